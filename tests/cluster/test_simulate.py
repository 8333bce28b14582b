"""The clock of plans: shared links, slowdown, and times of whole plans on described clusters, against closed forms."""

import gc
import json
import weakref
from dataclasses import replace

import pytest

from megatron.context_parallel import UsageError
from megatron.context_parallel.cluster.description import (
    PRESETS,
    AttentionRate,
    Cluster,
    load_cluster,
)
from megatron.context_parallel.cluster.simulate.block_time import BlockTime
from megatron.context_parallel.cluster.simulate.one_pass import simulate
from megatron.context_parallel.cluster.simulate.seen_shares import THOUSANDTHS
from megatron.context_parallel.cluster.simulate.symmetry import symmetry_of
from megatron.context_parallel.commands.plan import main as plan_tool
from megatron.context_parallel.plan.flows import Flows, Task
from megatron.context_parallel.plan.ir import Attend, PlanError, Step
from megatron.context_parallel.plan.schedule import schedule
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.plan.volume import Shape
from megatron.context_parallel.runtime.head_swap import place_of
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.layout import LAYOUTS, Chunks
from megatron.context_parallel.tokens.mask import Mask
from tests.support.box import BOX, BOX_TEXT, DEVICE

SHAPE = Shape(rows=1024, heads=8, kv_heads=8, head_dim=64, itemsize=2)
KV = 2 * 1024 * 8 * 64 * 2  # bytes of a chunk
NO_WORK = replace(DEVICE, attention=(AttentionRate(rows=1, forward_TFLOP_s=1e9, backward_TFLOP_s=1e9),))


def ends(flows: Flows) -> list[tuple[float, list]]:
    found = []
    while done := flows.advance():
        found.append((pytest.approx(flows.now), done))
    return found


def seconds(spec: str, cluster: Cluster, shape: Shape = SHAPE, backward: bool = False) -> float:
    plan = parse_spec(spec).plan(cluster.ranks, backward=backward, heads=shape.heads, kv_heads=shape.kv_heads)
    return simulate(plan, cluster, shape).seconds


def test_what_a_task_leaves_of_a_link_goes_to_the_others():
    flows = Flows()
    narrow, wide = flows.resource("narrow", 1.0), flows.resource("wide", 2.0)
    flows.add("a", Task(1.0, (narrow,), (0,)))
    flows.add("b", Task(1.0, (narrow, wide)))
    flows.add("c", Task(1.5, (wide,)))  # b takes half of the narrow link, so c has 1.5 of the wide one
    assert (flows.computing(narrow), flows.computing(wide)) == (1, 0)
    flows.add("late", Task(1.0, (wide,)), delay=2.0)
    flows.add("alone", Task(0.25))
    assert ends(flows) == [(0.25, ["alone"]), (1.0, ["c"]), (2.0, ["a", "b"]), (2.5, ["late"])]


@pytest.mark.parametrize("compute,message", [(2.0, 5.0), (5.0, 2.0)])
def test_what_does_not_overlap_adds_up(compute, message):
    """With both slowed by w, a block and a message take max + w min together."""
    flows = Flows((0.9, 0.9))
    flows.add("block", Task(compute, (flows.resource("core", 1.0),), (0,)))
    flows.add("message", Task(message, (flows.resource("link", 1.0),), (0, 1)))
    while flows.advance():
        pass
    assert flows.now == pytest.approx(5.0 + 0.9 * 2.0)


def test_a_ring_is_as_fast_as_its_slowest_link():
    slow = replace(BOX, device=NO_WORK)
    assert seconds("ring", slow) == pytest.approx(7 * KV / 10e9, rel=1e-3)
    assert seconds("ring", slow.part(4)) == pytest.approx(3 * KV / 100e9, rel=1e-3)
    late = replace(slow, nics=replace(slow.nics, latency_us=500))
    assert seconds("ring", late) == pytest.approx(7 * (KV / 10e9 + 500e-6), rel=1e-3)


def test_ranks_that_share_a_nic_share_its_rate():
    """In a gather of all chunks one stream crosses between two nodes; when all swap heads, 4 x 4 chunk parts do."""
    own, shared = (replace(BOX, device=NO_WORK, nics=replace(BOX.nics, per_node=n)) for n in (4, 1))
    assert seconds("allgather", shared) == pytest.approx(seconds("allgather", own))
    assert seconds("ulysses", shared) == pytest.approx(4 * seconds("ulysses", own), rel=1e-3)
    assert seconds("ulysses", own) == pytest.approx(4 / 8 * 2 * KV / 10e9, rel=0.02)


def test_an_oversubscribed_switch_slows_what_crosses_it():
    flat = replace(BOX, nodes=4, device=NO_WORK, nodes_per_switch=2)
    thin = replace(flat, oversubscription=8.0)  # 8 NICs of 10 GB/s and an uplink of 10
    assert seconds("allgather", thin) == pytest.approx(seconds("allgather", flat))  # one stream of its ring crosses
    assert seconds("ulysses", thin, replace(SHAPE, heads=16, kv_heads=16)) > 2 * seconds(
        "ulysses", flat, replace(SHAPE, heads=16, kv_heads=16)
    )


def test_blocks_hide_messages_and_cores_are_shared():
    block = 4 * 1024 * 1024 / 2 * 8 * 64 / 1e12  # zigzag: each pair of chunks is half seen
    assert seconds("ring", BOX) == pytest.approx(8 * max(block, KV / 10e9), rel=0.02)
    assert seconds("ring", replace(BOX, shared_cores=2)) == pytest.approx(8 * 8 * block / 2, rel=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_seen_shares_are_those_of_the_mask(layout):
    plan = parse_spec("allgather", layout=layout).plan(4)
    shares = {}
    for name, mask in {"causal": Mask(), "full": Mask(False), "window": Mask(True, (255, 0))}.items():
        time = BlockTime(DEVICE, plan, SHAPE, mask, 4096, "bf16")
        shares[name] = sum(time.shares.seen(q).sum() for q in range(4)) / THOUSANDTHS
    assert shares["full"] == pytest.approx(16)
    assert shares["causal"] == pytest.approx(8, rel=0.01)
    assert shares["window"] == pytest.approx(4096 * 256 / 1024**2, rel=0.05)
    narrow = BlockTime(DEVICE, plan, SHAPE, Mask(True, (1, 0)), 65536, "bf16")
    assert all(narrow(Attend((q,), (q,))) > 0 for q in range(4))


def test_rates_are_between_those_measured():
    rates = tuple(AttentionRate(rows=r, forward_TFLOP_s=f, backward_TFLOP_s=f) for r, f in ((256, 1.0), (4096, 3.0)))
    time = BlockTime(replace(DEVICE, attention=rates), parse_spec("ring").plan(4), SHAPE, Mask(False), 4096, "bf16")
    assert time(Attend((0,), (1,))) == pytest.approx(4 * 1024**2 * 8 * 64 / 2e12, rel=1e-3)


def test_gathered_keys_have_rates_of_their_own():
    """A zigzag chunk is two progressions of 512 queries, each against up to 3.5 chunks of keys."""
    square, long = (
        AttentionRate(rows=512, keys=k, forward_TFLOP_s=f, backward_TFLOP_s=f) for k, f in ((None, 1.0), (1024, 2.0))
    )
    device = replace(DEVICE, attention=(square, long))
    times = {
        spec: BlockTime(device, parse_spec(spec).plan(4), SHAPE, Mask(False), 4096, "bf16")(Attend((0,), kv))
        for spec, kv in (("ring", (1,)), ("allgather", (0, 1, 2, 3)))
    }
    assert times["ring"] == pytest.approx(4 * 1024**2 * 8 * 64 / 1e12, rel=1e-3)
    assert times["allgather"] == pytest.approx(4 * times["ring"] / 2, rel=1e-3)


FOLDS = {  # ranks of a group, and groups, that are simulated of 32 ranks
    "ring": (8, 1),
    "mesh": (8, 1),
    "allgather": (8, 1),
    "attention2d": (32, 1),  # its keys first move to where no turn of the ranks leads
    "ulysses": (1, 8),
    "loongtrain:head_parallel_size=2,inner_ring_size=4": (4, 2),
    "usp:head_parallel_size=4,placement=context-first": (8, 1),
    "usp:head_parallel_size=16,placement=context-first": (2, 4),
}


@pytest.mark.parametrize("spec", FOLDS)
def test_ranks_that_do_the_same_are_simulated_once(spec):
    box = load_cluster("dgx-h100").part(32)
    streams = {"inside": replace(box.inside, stream_GB_s=100.0), "nics": replace(box.nics, stream_GB_s=20.0)}
    cluster = replace(box, **streams)
    for backward in (False, True):
        plan = parse_spec(spec).plan(32, backward=backward, heads=64, kv_heads=64)
        every = simulate(plan, cluster, SHAPE)
        few = simulate(plan, cluster, SHAPE, all_up_to=1)
        assert (every.symmetry.ranks, every.symmetry.groups) == (plan.n, plan.head_parallel_size)
        assert (few.symmetry.ranks, few.symmetry.groups) == FOLDS[spec]
        assert few.seconds == pytest.approx(every.seconds, rel=1e-9)
        assert few.compute == pytest.approx(every.compute, rel=1e-9)
        assert len(few.spans) == len(every.spans) * few.symmetry.ranks / plan.n
    assert simulate(plan, cluster, SHAPE).spans == every.spans  # the same numbers on every run


@pytest.mark.parametrize("spec", ["ring", "mesh:grid=4x8", "loongtrain", "allgather", "attention2d:grid=1x32"])
def test_few_ranks_give_the_digits_of_all(spec):
    cluster = load_cluster("dgx-h100")
    for backward in (False, True):
        plan = parse_spec(spec).plan(32, backward=backward, heads=8, kv_heads=8)
        every, few = (simulate(plan, cluster, SHAPE, all_up_to=ranks) for ranks in (32, 1))
        assert few.symmetry.ranks == 8
        assert few.seconds == every.seconds


@pytest.mark.parametrize("spec,n", [("attention2d", 100), ("attention2d:layout=cyclic,head_parallel_size=2", 32)])
def test_diagonals_of_a_square_give_the_digits_of_all(spec, n):
    box = load_cluster("dgx-h100")
    cluster = replace(box, nodes=50, devices_per_node=2, nics=replace(box.nics, per_node=1, stream_GB_s=20.0))
    for backward in (False, True):
        plan = parse_spec(spec).plan(n, backward=backward, heads=8, kv_heads=8)
        part, limits = cluster.part(plan.all_ranks), (plan.all_ranks, 1)
        every, few = (simulate(plan, part, SHAPE, all_up_to=ranks) for ranks in limits)
        assert (plan.n, few.symmetry.ranks) in ((100, 20), (16, 4))
        assert (few.seconds, few.compute) == (every.seconds, every.compute)


def test_a_declared_period_is_checked():
    """Of a mesh with groups of 4, only every fourth rank does the same."""
    good = parse_spec("mesh:grid=4x4").plan(16)
    assert good.period == 4 and verify(good).steps
    with pytest.raises(PlanError, match="rank 2: does not do what rank 0 does, but mesh declares period 2"):
        verify(replace(good, period=2))
    square = parse_spec("attention2d").plan(16)
    assert (square.period, square.width) == (4, 4) and verify(square).steps
    with pytest.raises(PlanError, match="rank 4: does not do what rank 0 does, but attention2d declares period 4"):
        verify(replace(square, width=1))
    blocks = BlockTime(DEVICE, good, SHAPE, Mask(), 16 * 1024, "bf16")
    for period, ranks in ((None, 8), (4, 8), (16, 16)):  # None: the steps are compared
        assert symmetry_of(replace(good, period=period), blocks, 8).ranks == ranks


def test_what_readers_keep_of_a_plan_goes_with_it():
    plan = parse_spec("usp:head_parallel_size=2").plan(8)
    assert schedule(plan, 1) is schedule(plan, 1) and place_of(plan, 3) is place_of(plan, 3)
    kept = [simulate(plan, load_cluster("dgx-h100").part(8), SHAPE, all_up_to=1).symmetry for _ in range(2)]
    assert kept[0] is kept[1]
    gone = weakref.ref(plan)
    del plan
    gc.collect()
    assert gone() is None


def test_a_rank_begins_its_second_pass_when_its_first_is_done():
    cluster = load_cluster("dgx-h100").part(16)
    forward, backward = [parse_spec("lightseq").plan(16, backward=b, heads=8, kv_heads=8) for b in (False, True)]
    first, alone = simulate(forward, cluster, SHAPE), simulate(backward, cluster, SHAPE).seconds
    assert max(first.ends.values()) == pytest.approx(first.seconds) and min(first.ends.values()) < first.seconds
    together = dict.fromkeys(first.ends, 1.0)
    assert simulate(backward, cluster, SHAPE, starts=together).seconds == pytest.approx(1 + alone)
    assert alone < simulate(backward, cluster, SHAPE, starts=first.ends).seconds < first.seconds + alone


def test_a_device_that_stands_for_its_peer_is_slowed_once():
    """The two ranks of a head group lie alike on other nodes, so one device sends and receives for both."""
    cluster = replace(BOX, nodes=4, compute_slowdown=0.5, message_slowdown=0.5)
    plan = parse_spec("usp:head_parallel_size=2,placement=context-first").plan(16, heads=8, kv_heads=8)
    few = simulate(plan, cluster, SHAPE, all_up_to=1)
    assert (few.symmetry.ranks, few.symmetry.groups) == (4, 1)
    assert few.seconds == pytest.approx(simulate(plan, cluster, SHAPE).seconds, rel=1e-9)


def test_messages_between_two_ranks_are_one_stream():
    """In the backward pass keys and their gradients are on the way together. A swap of heads has no such limit."""
    slow = replace(BOX, device=NO_WORK)
    thin = replace(slow, nics=replace(slow.nics, stream_GB_s=5), inside=replace(slow.inside, stream_GB_s=50))
    half = replace(SHAPE, partial_itemsize=2)
    assert seconds("ring", thin) == pytest.approx(7 * KV / 5e9, rel=1e-3)
    assert seconds("ring", thin.part(4)) == pytest.approx(3 * KV / 50e9, rel=1e-3)
    for spec, shape in (("ring", half), ("ring:partials_in_16_bits=yes", SHAPE)):
        assert seconds(spec, thin, shape, backward=True) == pytest.approx(14 * KV / 5e9, rel=1e-3)
    assert seconds("ring", thin, backward=True) == pytest.approx((7 + 2 * 7) * KV / 5e9, rel=1e-3)
    assert seconds("ulysses", thin) == seconds("ulysses", slow)


def test_a_pass_and_a_swap_have_costs_of_their_own():
    slow = replace(BOX, device=NO_WORK)
    dear = replace(slow, device=replace(NO_WORK, pass_us=1000, swap_us=200))
    assert seconds("ring", dear) == pytest.approx(seconds("ring", slow) + 1e-3)
    assert seconds("ulysses", dear) == pytest.approx(seconds("ulysses", slow) + 1e-3 + 2 * 200e-6)
    packing = replace(slow, device=replace(NO_WORK, packing_GB_s=100.0))
    moved = 4 * (2 * KV + 4 * 1024 * 8)  # queries, keys, values and outputs with log-sum-exp
    assert seconds("ulysses", packing) == pytest.approx(seconds("ulysses", slow) + moved / 100e9, rel=1e-4)


def test_more_nodes_have_a_slower_one():
    """A ring over 8 nodes of one device waits for its messages only."""
    slow = replace(BOX, device=NO_WORK, nodes=8, devices_per_node=1, nics=replace(BOX.nics, per_node=1))
    wide = replace(slow, nics=replace(slow.nics, spread=0.1, stream_GB_s=5.0))
    assert seconds("ring", wide) == pytest.approx(2 * 1.3 * seconds("ring", slow))  # log2(8) times 0.1


def test_striped_blocks_of_many_ranks_are_alike():
    """They differ by half a row of 1024, on and off the diagonal."""
    n, length = 64, 2**16
    choice = parse_spec("ring", layout="cyclic")
    plan = choice.plan(n, visible_pairs=Mask(True).pairs(*Chunks.pair("cyclic", n, length)))
    shape = replace(SHAPE, rows=length // n)
    assert symmetry_of(plan, BlockTime(DEVICE, plan, shape, Mask(True), length, "bf16"), 8).ranks == 8


def test_a_rank_that_does_something_else_is_not_folded():
    """The last of 16 ranks computes its block of two chunks in another step."""
    ring = parse_spec("ring").plan(16, causal=False)
    *others, last = (ring.steps[rank] for rank in range(16))
    late = (Step(last[0].comm), Step(last[1].comm, last[0].attend + last[1].attend), *last[2:])
    seconds = {name: symmetry_of(plan, lambda block: 1.0, 4) for name, plan in {
        "alike": ring, "late": replace(ring, steps=(*others, late)),
    }.items()}  # fmt: skip
    assert seconds["alike"].ranks == 4 and seconds["late"].ranks == 16
    assert symmetry_of(ring, lambda block: float(block.q_chunks[0] % 8), 4).ranks == 8  # blocks repeat after 8
    assert symmetry_of(ring, lambda block: 1.0, 3).ranks == 16  # the links repeat after no part of the ranks
    assert symmetry_of(parse_spec("ring:layout=contiguous").plan(16), lambda block: 1.0, 4).ranks == 16


@pytest.mark.parametrize(
    "text,message",
    [
        ("name: x\nnods: 3", "nods: unknown; use one of name"),
        ("name: x", "source: missing"),
        ("[1, 2", "not YAML"),
        ("just words", "the file: give name"),
        (BOX_TEXT.replace("nodes: 2", "nodes: 0"), "nodes 0: need a whole number, 1 or more"),
        (BOX_TEXT.replace("GB_s: 10,", "GB_s: -1,"), "nics.GB_s -1: need a number above 0"),
        (BOX_TEXT.replace("rows: 1,", "rows: one,"), "device.attention[0].rows one: need a whole number"),
    ],
)
def test_a_wrong_description_is_one_line(tmp_path, text, message):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UsageError) as error:
        load_cluster(str(tmp_path / "c.yaml"))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_file_is_the_cluster_it_describes(tmp_path):
    (tmp_path / "box.yaml").write_text(BOX_TEXT)
    assert load_cluster(str(tmp_path / "box.yaml")) == BOX


def test_presets_are_possible_clusters():
    for path in PRESETS.iterdir():
        cluster = load_cluster(path.name.removesuffix(".yaml"))
        assert path.name == f"{cluster.name}.yaml" and len(cluster.source) > 40
        device, box = cluster.device, cluster.part(8)
        assert all(max(r.forward_TFLOP_s, r.backward_TFLOP_s) < 0.9 * device.peak_TFLOP_s for r in device.attention)
        keys = 2 * 4096 * 8 * 128 * 2
        slowest = min(link.GB_s for link in (box.nics if box.nodes > 1 else None, box.inside) if link) * 1e9
        computed = 4 * (8 * 4096) ** 2 / 2 * 8 * 128 / 8 / (device.peak_TFLOP_s * 1e12)
        time = seconds("ring", box, Shape(rows=4096, heads=8, kv_heads=8, head_dim=128, itemsize=2))
        assert max(7 * keys / slowest, computed) < time < 20 * (7 * keys / slowest + computed)


def test_a_cluster_without_the_links_it_needs_is_refused():
    with pytest.raises(UsageError, match="nics is missing, but there are 2 nodes"):
        replace(BOX, nics=None)
    with pytest.raises(UsageError, match="6 ranks do not fill nodes of 4 devices; give 4"):
        BOX.part(6)
    with pytest.raises(UsageError, match=r"no such file or preset; give a \.yaml file, or one of .*dgx-a100, dgx-h100"):
        load_cluster("dgx")


def test_the_plan_tool_predicts_and_writes_a_timeline(tmp_path, capsys):
    flags = ["--ranks", "16", "--seq-length", "65536", "--cluster", "dgx-h100"]
    plan_tool(["mesh", *flags, "--timeline", str(tmp_path / "t.json")])
    assert "exposed" in capsys.readouterr().out
    events = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in events} == set(range(16)) and {e["tid"] for e in events} == {"blocks", "keys", "queries"}
    pairs = [e for e in events if e["tid"] == "blocks" and e["args"]["pass"] == "forward"]
    assert len(pairs) == 16 * 16


HOST = replace(BOX, device=NO_WORK, shared_cores=2)


def test_processors_work_for_messages():
    """8 ranks send and receive 7 chunks of keys and values; two processors do the work."""
    each = replace(HOST, nics=replace(HOST.nics, GB_s=1e6), inside=replace(HOST.inside, GB_s=1e6), message_us=100)
    assert seconds("ring", each) == pytest.approx(8 * 7 * 4 * 100e-6 / 2, rel=0.01)
    links = replace(HOST.nics, processor_ns_per_byte=1), replace(HOST.inside, processor_ns_per_byte=1)
    bytewise = replace(HOST, nics=links[0], inside=links[1])
    assert seconds("ring", bytewise) == pytest.approx(8 * 7 * 2 * KV * 1e-9 / 2, rel=0.01)
    assert seconds("ring", replace(bytewise, shared_cores=None)) == pytest.approx(7 * KV / 10e9, rel=0.01)


def test_a_message_waits_for_processors_that_compute():
    """Messages of a ring start while 8 ranks compute on 2 processors: each waits 4 times as long as for one of them."""
    device = replace(DEVICE, attention=(AttentionRate(rows=1, forward_TFLOP_s=1, backward_TFLOP_s=1),))
    fast = replace(HOST, device=device, inside=replace(HOST.inside, GB_s=1e6), nics=replace(HOST.nics, GB_s=1e6))
    plan, far = parse_spec("ring").plan(8), 1e6  # microseconds: far longer than blocks
    waits = [simulate(plan, replace(fast, busy_latency_us=us), SHAPE, Mask(False)).seconds for us in (0.0, far)]
    assert waits[0] < 1 and waits[1] >= 4


def test_a_swap_has_one_message_and_one_latency_for_each_other_rank():
    slow = replace(BOX, device=NO_WORK, inside=replace(BOX.inside, latency_us=1e6))
    for buffered in (False, True):
        assert seconds("ulysses", replace(slow, buffered_sends=buffered)) == pytest.approx(2, rel=0.01)
    dear = replace(slow, message_us=1e6)  # at both ends, of seven messages to heads and seven back
    assert seconds("ulysses", dear) - seconds("ulysses", slow) == pytest.approx(2 * 2 * 7, rel=0.01)


def test_steps_and_merges_take_time():
    idle = replace(BOX, device=replace(NO_WORK, step_us=50), nics=replace(BOX.nics, GB_s=1e6))
    idle = replace(idle, inside=replace(idle.inside, GB_s=1e6))
    assert seconds("ring", idle) == pytest.approx(8 * 50e-6, rel=0.01)
    slow = replace(idle, device=replace(NO_WORK, memory_GB_s=1))
    plan = parse_spec("attention2d:grid=1x8").plan(8)  # queries pass by, and 7 outputs are merged on their way
    merged = 7 * 3 * 4 * (1024 * 8 * 64 + 1024 * 8) / 1e9
    written = simulate(plan, slow, SHAPE).seconds - merged
    assert 0 < written < 8 * 12 * 1024 * 8 * 64 / 1e9 * 1.01  # each block adds its output to a partial


def test_exchanges_of_all_pairs_crowd_nics():
    slow = replace(BOX, device=NO_WORK, nodes=8, devices_per_node=1, nics=replace(BOX.nics, per_node=1))
    crowded = replace(slow, nics=replace(slow.nics, crowding=0.1))
    outputs = 7 * 4 * (1024 * 8 * 64 + 1024 * 8) / 10e9  # of which a NIC then carries 1 / (1 + 0.1 * 6)
    heads = 4 * 7 / 8 * 2 * 1024 * 8 * 64 / 10e9  # of queries, keys, values and outputs, 7 of 8 leave
    for spec, sent in (("attention2d:grid=1x8,overlap=no", outputs), ("ulysses", heads)):
        assert seconds(spec, crowded) - seconds(spec, slow) == pytest.approx(0.6 * sent, rel=0.02)
        plan = parse_spec(spec).plan(8)
        every, few = (simulate(plan, crowded, SHAPE, Mask(False), all_up_to=ranks) for ranks in (8, 1))
        assert (few.symmetry.ranks, few.symmetry.groups) == (1, 1)
        assert few.seconds == pytest.approx(every.seconds, rel=1e-9)


def test_links_of_switches_do_not_crowd():
    """The link of a switch has a quarter of the rate of its NIC, which keeps 1 / (1 + 0.1 * 6) of it."""
    nics = replace(BOX.nics, per_node=1)
    switched = replace(BOX, nodes=8, devices_per_node=1, nics=nics, nodes_per_switch=1, oversubscription=4)
    crowded = replace(switched, nics=replace(nics, crowding=0.1))
    assert seconds("ulysses", crowded) == pytest.approx(seconds("ulysses", switched), rel=1e-9)


def test_other_groups_crowd_nics_too():
    """Two rings of two ranks on one NIC: its rate is divided by two pairs and by 1 + 0.1, as two groups and as one."""
    nics = replace(BOX.nics, per_node=1, GB_s=1, latency_us=0, crowding=0.1)
    two = replace(BOX, device=NO_WORK, nodes=2, devices_per_node=2, nics=nics)
    keys = 2 * 1024 * 8 * 64 * 2 / 1e9
    plan = parse_spec("ring").plan(2)
    alone, beside = (simulate(plan, two, SHAPE, Mask(False), devices=(0, 2), others=o) for o in ((), ((1, 3),)))
    assert (alone.seconds, beside.seconds) == pytest.approx((keys, 2 * 1.1 * keys), rel=1e-3)
    whole = simulate(parse_spec("usp:head_parallel_size=2").plan(4), two, SHAPE, Mask(False))
    (ring,) = {round(span.end - span.start, 9) for span in whole.spans if span.channel == "ring"}
    assert ring == pytest.approx(beside.seconds, rel=1e-3)


def test_buffered_sends_do_not_wait_for_the_receiver():
    """The contiguous ring sends gradients home across the messages of the ring, which delays one hop, not all."""
    waits, buffered = (replace(BOX, device=NO_WORK, buffered_sends=b) for b in (False, True))
    shape = replace(SHAPE, itemsize=4)
    times = [seconds("ring:layout=contiguous", cluster, shape, backward=True) for cluster in (waits, buffered)]
    assert times[1] < 0.95 * times[0]
    assert seconds("ring", waits) == pytest.approx(seconds("ring", buffered), rel=1e-6)


def test_blocks_are_computed_in_pieces_of_their_mask():
    """A zigzag chunk against itself is a causal square, and against any other a full rectangle."""
    rates = [
        AttentionRate(rows=1, mask=m, forward_TFLOP_s=f, backward_TFLOP_s=f) for m, f in (("full", 2), ("causal", 1))
    ]
    device = replace(DEVICE, attention=tuple(rates), block_us=100)
    time = BlockTime(device, parse_spec("ring").plan(4), SHAPE, Mask(), 4096, "bf16")
    half = 4 * 1024**2 / 2 * 8 * 64 / 1e12
    assert time(Attend((0,), (0,))) == pytest.approx(100e-6 + half, rel=1e-3)
    assert time(Attend((0,), (1,))) == pytest.approx(100e-6 + half / 2, rel=1e-3)
    assert time(Attend((2,), (0, 1))) == pytest.approx(100e-6 + half, rel=1e-3)
    cyclic = BlockTime(device, parse_spec("ring:layout=cyclic").plan(4), SHAPE, Mask(), 4096, "bf16")
    assert cyclic(Attend((2,), (0, 1))) == pytest.approx(2 * (100e-6 + half), rel=5e-3)
    with pytest.raises(UsageError, match="mask half: give full or causal"):
        replace(rates[0], mask="half")
