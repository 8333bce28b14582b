"""Pictures and pages of plans: what they show, the images of the documentation, and the page in a browser."""

import itertools
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import matplotlib.image
import numpy
import pytest
from matplotlib.colors import to_rgba
from matplotlib.text import Text
from PIL import Image

from megatron.context_parallel.plan.ir import T
from megatron.context_parallel.plan.pictures.draw import RANKS, draw, figure_of, file_name
from megatron.context_parallel.plan.pictures.lanes import picture
from megatron.context_parallel.plan.pictures.page import write_page
from megatron.context_parallel.plan.trace import trace
from megatron.context_parallel.plan.volume import Shape, received_bytes
from megatron.context_parallel.strategies import parse_spec
from tools import compare_strategies, draw_causal, draw_layers, make_images

ROOT = Path(__file__).parents[2]
IMAGES = make_images.FOLDER
SPECS = [
    ("ring:layout=contiguous", 8),
    ("allgather", 8),
    ("lightseq", 8),
    ("loongtrain:inner_ring_size=2", 8),
    ("usp:head_parallel_size=2", 8),
    ("attention2d", 9),
    ("mesh", 16),
]


# -- what a picture shows ------------------------------------------------------------------------------------------


def test_a_ring_of_two():
    """Each rank computes its own pair while its keys are sent, then the other one."""
    shown = picture(parse_spec("ring").plan(2))
    assert shown.lanes == ("blocks", "ring") and shown.finish == 2 and shown.tensors == [T.KV]
    assert shown.title == "ring, 2 ranks, zigzag layout, forward"
    bars = [(bar.rank, bar.lane, bar.start, bar.end, bar.texts[0]) for bar in shown.bars]
    assert sorted(bars) == [
        (0, 0, 0, 1, "0,0"),
        (0, 0, 1, 2, "0,1"),
        (0, 1, 0, 0.5, "KV0→1"),
        (1, 0, 0, 1, "1,1"),
        (1, 0, 1, 2, "1,0"),
        (1, 1, 0, 0.5, "KV1→0"),
    ]


def test_a_rank_that_sends_nothing_shows_what_it_receives():
    shown = picture(parse_spec("ring", layout="contiguous").plan(2), transfer_time=0.25)
    assert [bar.texts[0] for bar in shown.bars if bar.tensor] == ["KV0→1", "KV0←0"]
    assert {bar.end for bar in shown.bars if bar.tensor} == {0.25}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("spec", "n"), SPECS)
def test_every_message_once_and_no_bar_over_another(spec, n, backward):
    plan = parse_spec(spec).plan(n, backward=backward)
    shown, run = picture(plan), trace(plan, transfer_time=lambda transfer: 0.5 * transfer.share)
    busy = Counter()
    for span in run.spans:
        busy[span.rank, shown.lanes.index(span.channel or "blocks")] += span.end - span.start
    for (rank, lane), bars in itertools.groupby(
        sorted(shown.bars, key=lambda bar: (bar.rank, bar.lane, bar.start)), key=lambda bar: (bar.rank, bar.lane)
    ):
        bars = list(bars)
        assert all(a.end <= b.start for a, b in itertools.pairwise(bars))
        assert sum(bar.end - bar.start for bar in bars) == pytest.approx(busy[rank, lane], abs=1e-4)
    sent = Counter(t for bar in shown.bars for t in bar.sent)
    planned = Counter()
    for rank in range(plan.n):
        for step in plan.steps[rank]:
            planned.update(t for op in step.comm for t in op.transfers(rank) if t.sender == rank)
        one = plan.grid.rank(context=rank)
        planned.update(t for op in plan.swaps for t in plan.swap_transfers(op, one) if t.sender == one)
    assert sent == planned
    pairs = Counter(pair for bar in shown.bars for pair in bar.pairs)
    assert pairs == Counter((q, kv) for q in range(plan.n) for kv in range(plan.n) if plan.visible_pairs(q, kv))


@pytest.mark.parametrize("backward", [False, True])
def test_rounds_of_tokens_swap_as_much_as_one_round(backward):
    """A rank sends and receives beside its blocks, and the swaps of both directions are drawn in turn."""
    one, four = (
        picture(parse_spec(f"ulysses:layout=cyclic,token_rounds={rounds}").plan(4, backward=backward))
        for rounds in (1, 4)
    )
    assert "in 4 rounds of tokens, cyclic" in four.title and four.finish < one.finish
    for lane in (0, 1):
        bars = sorted((bar.start, bar.end) for bar in four.bars if bar.lane == lane)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(bars))
        whole = sum(bar.end - bar.start for bar in one.bars if bar.lane == lane)
        assert sum(end - start for start, end in bars) == pytest.approx(whole, abs=1e-4)


@pytest.mark.parametrize(
    ("spec", "n", "backward"),
    [
        ("ulysses:layout=cyclic,token_rounds=4", 4, False),
        ("ring:layout=contiguous", 8, True),
        ("usp:head_parallel_size=2", 8, False),
        ("attention2d", 9, True),
        ("mesh", 16, False),
        ("allgather", 12, True),
    ],
)
def test_no_text_lies_over_another(spec, n, backward):
    figure = figure_of(picture(parse_spec(spec).plan(n, backward=backward)))
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text()]
    boxes = numpy.array([text.get_window_extent(renderer).extents for text in texts])
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    common = numpy.minimum(high, high.swapaxes(0, 1)) - numpy.maximum(low, low.swapaxes(0, 1))
    over = numpy.argwhere(numpy.triu((common > 1).all(axis=2), 1))  # more than a pixel each way
    assert not len(over), [(texts[a].get_text(), texts[b].get_text()) for a, b in over[:5]]
    wide, high = figure.bbox.size
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2] <= wide).all() and (boxes[:, 3] <= high).all()


def test_cells_have_the_colour_of_their_rank():
    matrix = figure_of(picture(parse_spec("ring:layout=contiguous").plan(20))).axes[0]
    cells = {(cell.get_y() + 0.5, cell.get_x() + 0.5): cell.get_facecolor() for cell in matrix.patches}
    assert cells == {(q, kv): to_rgba(RANKS[q]) for q in range(20) for kv in range(q + 1)}
    assert len(set(RANKS)) == 20


def test_svg(tmp_path):
    draw(parse_spec("ring").plan(4), tmp_path / "ring.svg")
    assert "ring, 4 ranks, zigzag layout, forward" in (tmp_path / "ring.svg").read_text()


# -- the images of the documentation -------------------------------------------------------------------------------


def test_images_show_what_there_is_today():
    """Run `python -m tools.make_images` if this fails. Compared is what is shown, not how fonts draw it."""
    assert {path.name: Image.open(path).text["Description"] for path in IMAGES.glob("*.png")} == make_images.digests()
    assert (IMAGES / make_images.LOGO).read_text() == make_images.logo()
    with Image.open(IMAGES / make_images.MOVING) as image:
        assert image.info["comment"].decode() == picture(make_images.moving()).digest
        assert image.n_frames == 9


def test_every_image_is_on_a_page_and_small():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), ROOT / "mkdocs.yml"]
    shown = set(re.findall(r"images/([^)\s]+\.(?:png|gif|svg))", "".join(page.read_text() for page in pages)))
    assert shown == {path.name for path in IMAGES.iterdir()} - {compare_strategies.FILE.name}
    assert shown == {*make_images.digests(), make_images.MOVING, make_images.LOGO}
    for path in [*IMAGES.iterdir(), *ROOT.glob("docs/reproduction/*.png")]:
        assert path.stat().st_size < 150_000, path


def test_the_comparison_is_that_of_today():
    """Of 8 ranks; the others take minutes: `python -m tools.compare_strategies --check`."""
    recorded = json.loads(compare_strategies.FILE.read_text())
    assert [shown for shown in recorded if shown["ranks"] == 8] == list(compare_strategies.rows(most=8))
    assert len(recorded) == 8 * (3 + 3 + 3)


@pytest.mark.parametrize("spec", ["mesh", "lightseq", "allgather", "usp:head_parallel_size=2"])
def test_what_all_ranks_send_is_what_all_receive(spec):
    for backward in (False, True):
        plan = parse_spec(spec).plan(8, backward=backward)
        places = [plan.grid.rank(context=place) for place in range(plan.n)]
        sent = [compare_strategies.sent_by(plan, place, SHAPE) for place in range(plan.n)]
        assert sum(sent) == sum(received_bytes(plan, rank, SHAPE) for rank in places) > 0


def test_causal_blocks_are_as_long_as_what_is_seen():
    contiguous, zigzag = map(draw_causal.blocks, draw_causal.LAYOUTS)
    assert max(span.end for span in contiguous) == 7.5 and max(span.end for span in zigzag) == 4
    for spans in (contiguous, zigzag):
        assert sum(span.end - span.start for span in spans) == 8 * 8 / 2


def test_layers_name_the_files_of_a_batch():
    passed = draw_layers.passed("A batch through a training step")
    assert set(passed) <= set(" | ".join(draw_layers.layers()).split(" | "))
    assert passed["runtime"] == passed["kernels"] == [5]


def test_idle_time_is_what_blocks_leave():
    shown = picture(parse_spec("ring:layout=contiguous").plan(3))
    assert shown.idle == [(0, 1, 3), (1, 2, 3)]
    assert picture(parse_spec("ring").plan(3)).idle == []


def test_names_of_files():
    assert file_name("mesh:grid=2x4,layout=cyclic", 8, True) == "mesh-grid-2x4-layout-cyclic-8-ranks-backward"


# -- the page ------------------------------------------------------------------------------------------------------

SHAPE = Shape(rows=64, heads=8, kv_heads=2, head_dim=16, itemsize=2)
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def page_of(path: Path, specs: list[str], n: int, shape: Shape | None = None) -> Path:
    passes = (False, True)
    plans = {}
    for spec in specs:
        plans[spec] = [parse_spec(spec).plan(n, backward=backward) for backward in passes]
    write_page(plans, path, heads=(8, 2), shape=shape)
    return path


def test_page_needs_nothing_else(tmp_path):
    text = page_of(tmp_path / "p.html", ["ring"], 4).read_text()
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "src=" not in text and "@import" not in text and "url(" not in text


@pytest.mark.parametrize("spec", ["ring", "mesh", "lightseq", "allgather", "usp:head_parallel_size=2"])
def test_page_has_the_bytes_of_the_plan(spec, tmp_path):
    text = page_of(tmp_path / "p.html", [spec], 8, SHAPE).read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    for backward, shown in zip((False, True), data["plans"][0]["passes"], strict=True):
        plan = parse_spec(spec).plan(8, backward=backward)
        received = sum(received_bytes(plan, plan.grid.rank(context=rank), SHAPE) for rank in range(plan.n))
        assert sum(bar["sent"] for bar in shown["bars"]) == received > 0


def test_page_says_what_a_collective_moves(tmp_path):
    text = page_of(tmp_path / "p.html", ["allgather"], 8, SHAPE).read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    says = next(bar["says"] for bar in data["plans"][0]["passes"][0]["bars"] if bar["tensor"] and bar["rank"] == 5)
    moved = 7 * SHAPE.rows * SHAPE.kv_heads * SHAPE.head_dim * 2 * SHAPE.itemsize
    assert says[:3] == [
        "Rank 5: KV, keys, values",
        f"sends chunk 5 to ranks 0-4, 6, 7: {moved:,} bytes",
        f"receives chunks 0-4, 6, 7 from ranks 0-4, 6, 7: {moved:,} bytes",
    ]


PROBE = """
<pre id="probe"></pre>
<script>
const seen = {}, tip = () => [...$("tip").children].map(line => line.textContent);
const key = name => $("lanes").dispatchEvent(new KeyboardEvent("keydown", { key: name }));
seen.first = [$("title").textContent, $("time").textContent, $("computed").textContent, $("sent").textContent];
seen.begins = $("play").textContent;
$("slider").value = 1;
$("slider").dispatchEvent(new Event("input"));
seen.stopped = $("play").textContent;
seen.slid = [$("time").textContent, $("computed").textContent, $("computing").textContent, $("flying").textContent];
seen.hash = location.hash;
seen.later = document.querySelectorAll(".cell.later").length;
const message = shown.bars.findIndex(bar => bar.rank === 2 && bar.tensor === "KV");
marks[message].dispatchEvent(new Event("pointerenter"));
seen.message = tip();
seen.arrows = document.querySelectorAll(".arrow").length;
marks[message].dispatchEvent(new Event("pointerleave"));
seen.left = tip();
cells.find(cell => cell.bar.rank === 3).node.dispatchEvent(new Event("pointerenter"));
seen.cell = tip();
key("Escape"); key("ArrowRight"); key("ArrowRight"); key("ArrowDown"); key("ArrowDown");
seen.walked = tip();
$("strategy").value = 1;
$("strategy").dispatchEvent(new Event("change"));
$("way").querySelectorAll("input")[1].click();
seen.chosen = [$("title").textContent, location.hash];
seen["begins again"] = $("play").textContent;
$("play").click();
const frames = [];  // drawn here: a busy machine may draw none
window.requestAnimationFrame = frame => frames.push(frame);
$("play").click();
for (const elapsed of [100, 300]) frames.shift()(performance.now() + elapsed);
seen.played = [state.t > 0 && state.t < shown.finish, frames.length];
$("play").click();
seen.paused = $("play").textContent;
$("probe").textContent = JSON.stringify(seen);
</script>
"""


def browse(page: Path, *flags: str, at: str = "") -> subprocess.CompletedProcess:
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [
        f"--user-data-dir={page.parent / 'profile'}",
        "--virtual-time-budget=3000",
        *flags,
        f"{page.as_uri()}{at}",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")


@needs_browser
def test_page_in_a_browser(tmp_path):
    page = page_of(tmp_path / "p.html", ["ring", "mesh"], 4)
    page.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
    done = browse(page, "--dump-dom")
    assert "CONSOLE" not in done.stderr, done.stderr
    seen = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', done.stdout)[1])
    assert seen["first"] == ["ring, 4 ranks, zigzag layout, forward", "0 of 4", "0 of 16", "0 of 6 units"]
    assert seen["begins"] == seen["begins again"] == "❚❚ Pause" and seen["stopped"] == "▶ Play"
    assert seen["slid"] == ["1 of 4", "4 of 16", "4 of 4", "4"]
    assert seen["hash"] == "#plan=ring&amp;pass=forward&amp;t=1"
    assert seen["later"] == 8  # of 16 cells; 4 are done and 4 at work
    message = [
        "Rank 2: KV, keys, values",
        "sends chunk 2 to rank 3: 0.5 units",
        "channel ring",
        "step 0, time 0 to 0.5",
    ]
    assert seen["message"] == message
    assert seen["arrows"] == 1 and seen["left"] == []
    assert seen["cell"] == ["Rank 3 computes", "query chunk 3", "key/value chunk 3", "step 0, time 0 to 1"]
    assert seen["walked"] == ["Rank 1 computes", "query chunk 1", "key/value chunk 0", "step 1, time 1 to 2"]
    assert seen["chosen"][0] == "mesh, 4 ranks, zigzag layout, backward"
    assert seen["played"] == [True, 1] and seen["paused"] == "▶ Play"


@needs_browser
def test_address_of_a_moment_and_screenshot(tmp_path):
    page = page_of(tmp_path / "p.html", ["ring", "mesh"], 4, SHAPE)
    at = "#plan=mesh&pass=backward&t=1.5&bar=0"
    done = browse(page, f"--screenshot={tmp_path / 'p.png'}", "--window-size=1200,700", at=at)
    assert "CONSOLE" not in done.stderr, done.stderr
    image = (matplotlib.image.imread(tmp_path / "p.png")[:, :, :3] * 255).round().astype(int)
    colours = Counter(map(tuple, image.reshape(-1, 3)))
    block, keys = (0x41, 0x50, 0x6B), (0xE6, 0x9F, 0x00)
    assert colours[block] > 1000 and colours[keys] > 300 and len(colours) > 20
