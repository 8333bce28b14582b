"""The code in the documentation runs unchanged, its commands use existing flags, and its links have targets."""

import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from PIL import Image

from megatron.context_parallel.cluster.description import PRESETS, load_cluster
from megatron.context_parallel.cluster.search.candidates import Workload
from megatron.context_parallel.cluster.search.planner import GroupDevices, fastest
from megatron.context_parallel.strategies import STRATEGIES, parse_spec
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.dry_run import describe
from tests.support import training_case

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


def code(page: str) -> str:
    return "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL))


@pytest.fixture
def run_page(tmp_path, monkeypatch):
    """Runs the Python code of a page in an empty folder; strategies that it registers are forgotten."""
    monkeypatch.chdir(tmp_path)
    before = dict(STRATEGIES)

    def run(page: str) -> None:
        source = code(page)
        assert source
        exec(compile(source, page, "exec"), {"__name__": "example"})

    yield run
    STRATEGIES.clear()
    STRATEGIES.update(before)


@pytest.mark.parametrize("page", ["README.md", "docs/writing_a_strategy.md", "docs/cluster.md"])
def test_examples_run(page, run_page):
    run_page(page)


def test_broken_plans_print_what_the_page_says(run_page, capsys, tmp_path):
    run_page("docs/debugging.md")
    said = re.findall(r"```text\n(.*?)```", (ROOT / "docs/debugging.md").read_text(), re.DOTALL)
    assert len(said) == 5
    assert capsys.readouterr().out == "".join(said)
    assert (tmp_path / "short.html").exists()
    with Image.open(tmp_path / "short.png") as made, Image.open(ROOT / "docs/debugging.png") as shown:
        assert made.text["Description"] == shown.text["Description"]


def train_alone(family: str) -> training_case.Recorder:
    return training_case.train(family, train_iters=5)


def train_from_a_file(family: str, path: Path) -> training_case.Recorder:
    spread = {"context_parallel_size": 4, "cp_strategy": f"{path}:tokenring", "cp_layout": "cyclic"}
    return training_case.train(family, train_iters=5, **spread)


def test_documented_strategy_is_short_and_trains(ranks, tmp_path):
    first = re.search(r"```python\n(.*?)```", (ROOT / "docs/writing_a_strategy.md").read_text(), re.DOTALL)[1]
    logic = [line for line in first[first.index("def tokenring") :].splitlines() if line.strip()]
    assert len(logic) <= 15
    path = tmp_path / "tokenring.py"
    path.write_text(first)
    (alone,) = ranks(1, train_alone, "gpt3")
    for run in ranks(4, train_from_a_file, "gpt3", path):
        assert run.losses == pytest.approx(alone.losses, rel=1e-5)


def test_strategies_of_installed_packages_are_found(tmp_path):
    (tmp_path / "my_strategies.py").write_text(
        code("docs/writing_a_strategy.md").split("from megatron.context_parallel.plan.verify")[0]
    )
    description = tmp_path / "my_strategies-1.0.dist-info"
    description.mkdir()
    (description / "METADATA").write_text("Metadata-Version: 2.1\nName: my-strategies\nVersion: 1.0\n")
    toml = re.search(r"```toml\n(.*?)```", (ROOT / "docs/writing_a_strategy.md").read_text(), re.DOTALL)[1]
    group, line = toml.splitlines()
    name = group.split('"')[1]
    (description / "entry_points.txt").write_text(f"[{name}]\n" + line.replace('"', "") + "\n")
    program = "from megatron.context_parallel import STRATEGIES; print(*STRATEGIES)"
    path = f"{tmp_path}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": path}, check=True
    )
    assert {"tokenring", "skipring"} <= {*done.stdout.split()}
    (tmp_path / "my_strategies.py").write_text("1 / 0")
    failed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert failed.stderr.splitlines()[-1] == (
        "megatron.context_parallel.errors.UsageError: strategy tokenring of the installed package my-strategies: "
        "my_strategies cannot be imported (ZeroDivisionError: division by zero); repair or uninstall the package"
    )


def commands(page: Path) -> list[list[str]]:
    """The words of each command in the fenced shell blocks of a page."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def script_of(words: list[str]) -> tuple[str, list[str]] | None:
    """A script of this project that a command starts, and its arguments; of two, the first."""
    for i, word in enumerate(words):
        if word == "tools.netlab":
            return word, words[i + 1 :]
        if re.fullmatch(r"(pretrain_gpt|(tools|benchmarks|tests)/\w+)\.py", word):
            return word, words[i + 1 :]
    return None


def help_of(script: str, arguments: list[str], monkeypatch, capsys) -> str:
    """`--help`, and that of the subcommand if there is one."""
    said = ""
    monkeypatch.syspath_prepend(str((ROOT / script).parent))
    for chosen in ([], arguments[:1] if re.fullmatch("[a-z]+", arguments[0]) else []):
        every = ["all"] if script == "pretrain_gpt.py" else []
        monkeypatch.setattr(sys, "argv", [script, *chosen, "--help", *every])
        with pytest.raises(SystemExit):
            if script.endswith(".py"):
                runpy.run_path(str(ROOT / script), run_name="__main__")
            else:
                runpy.run_module(script, run_name="__main__")
        said += capsys.readouterr().out
    return said


def test_commands_have_flags_that_exist(monkeypatch, capsys):
    checked = 0
    for page in PAGES:
        for script, arguments in filter(None, map(script_of, commands(page))):
            own = arguments[: arguments.index("--")] if "--" in arguments else arguments
            flags = {word.split("=")[0] for word in own if word.startswith("--")}
            if flags:
                known = {*re.findall(r"--[a-z0-9-]+", help_of(script, arguments, monkeypatch, capsys))}
                assert flags <= known, f"{page}: {script} has no {flags - known}"
                checked += 1
    assert checked > 12


def test_scripts_in_commands_exist():
    for page in PAGES:
        for words in commands(page):
            for word in words:
                if re.match(r"(tools|benchmarks|tests|examples|docs)/.*\.(py|sh|sbatch)$", word):
                    assert (ROOT / word).exists(), f"{page}: {word}"


def trainer_commands(page: Path) -> list[tuple[int, list[str]]]:
    """(ranks, flags) of each complete command of the trainer; flags without data."""
    found = []
    for words in commands(page):
        script, arguments = script_of(words) or ("", [])
        if script != "pretrain_gpt.py" or "..." in words:
            continue
        if "--data-path" in arguments:
            at = arguments.index("--data-path")
            arguments = arguments[:at] + arguments[at + 2 :]
        sizes = dict(pairwise(words))
        ranks = int(sizes.get("--nproc-per-node", 1)) * int(sizes.get("--nnodes", 1))
        given = [word for word in words if word.startswith("WORLD_SIZE=")]
        found.append((int(given[0].split("=")[1]) if given else ranks, arguments))
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_training_commands_are_accepted(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = trainer_commands(ROOT / page)
    assert found
    for ranks, arguments in found:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        parse_args([*arguments, *([] if "--dry-run" in arguments else ["--dry-run"])])


def test_numbers_of_the_tutorial_are_those_of_its_dry_runs(monkeypatch, capsys):
    page = ROOT / "docs/tutorial.md"
    dry = [(ranks, arguments) for ranks, arguments in trainer_commands(page) if "--dry-run" in arguments]
    assert len(dry) == 4
    for ranks, arguments in dry:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        describe(parse_args(arguments))
        (total,) = re.findall(r"total +([\d.]+ GiB)", capsys.readouterr().out)
        assert total in page.read_text()


def test_numbers_of_the_choice_were_measured():
    table = (ROOT / "docs/choose.md").read_text().split("## Measured")[1].split("## What changes")[0]
    measured = (ROOT / "docs/benchmarks/emulated_cluster.md").read_text()
    numbers = re.findall(r"\d+\.\d{2,3}", table)
    assert len(numbers) > 20
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", measured), number


def test_predicted_times_of_the_choice_are_those_of_the_planner():
    rows = (ROOT / "docs/choose.md").read_text().split("## Predicted")[1].split("| `auto` takes")[0].splitlines()
    times = dict(re.findall(r"^\| `(\w+)`[^|]*\| ([\d.]+) ", "\n".join(rows), re.MULTILINE))
    assert {*times} == {*STRATEGIES}
    place, workload = GroupDevices(load_cluster("dgx-h100").part(8)), Workload(2**17, 32, 8, 128)
    for name, time in times.items():
        spec = f"{name}:head_parallel_size=4" if name in ("usp", "loongtrain") else name
        passes = [parse_spec(spec).plan(8, backward=backward, heads=32, kv_heads=8) for backward in (False, True)]
        simulated, _ = fastest({spec: passes}, place, workload)
        assert f"{1e3 * simulated[spec].seconds:.1f}" == time, spec


def test_the_page_lists_the_clusters_as_they_are():
    rows = {}
    for line in (ROOT / "docs/cluster.md").read_text().splitlines():
        if line.startswith("| `"):
            _, name, *cells = line.split("|")
            rows[name.strip(" `")] = [cell.strip() for cell in cells[:2]]
    names = [path.name.removesuffix(".yaml") for path in PRESETS.iterdir()]
    for name in names:
        cluster = load_cluster(name)
        assert rows[name][0] == f"{cluster.nodes} x {cluster.devices_per_node}"
        assert cluster.device.name.startswith(rows[name][1])


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            if not target.startswith("http"):
                path = page.parent / target if target else page
                assert path.exists(), f"{page}: {target}"
                assert not anchor or anchor in anchors(path), f"{page}: {target}#{anchor}"


def test_the_site_has_every_page():
    def pages(nav: object) -> set[str]:
        if isinstance(nav, str):
            return {nav}
        return set().union(*map(pages, nav.values() if isinstance(nav, dict) else nav))

    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    groups = [group for entry in nav for group in entry.values() if isinstance(group, list)]
    assert max(map(len, [nav, *groups])) <= 12, "a sidebar that nobody reads to its end"
    listed = pages(nav)
    assert listed == {str(path.relative_to(ROOT / "docs")) for path in ROOT.glob("docs/**/*.md")}


def test_architecture_shows_the_layers_that_are_checked():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    picture = (ROOT / "docs/architecture.md").read_text().split("```text\n")[1].split("```")[0]
    assert [re.split(r"  +", line)[0] for line in picture.splitlines()] == contract["layers"]
    folders = {path.name for path in (ROOT / "megatron/context_parallel").iterdir() if (path / "__init__.py").exists()}
    assert folders | {"errors", "options", "progress"} == {
        name for layer in contract["layers"] for name in layer.split(" | ")
    }


def test_no_file_imports_a_test_file():
    """What two of them share lies in tests/support."""
    found = []
    for path in [path for folder in ("tests", "benchmarks", "tools") for path in (ROOT / folder).rglob("*.py")]:
        found += re.findall(r"^\s*(?:from|import) tests\b.*\btest_.*", path.read_text(), re.MULTILINE)
    assert found == []
