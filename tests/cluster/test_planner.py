"""The planner: candidates and rejections, its bounds against the simulator, the choice of all ranks, the tools."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch

from benchmarks.auto_rank import sweep
from megatron.context_parallel import STRATEGIES, AllRanks, ContextParallel, UsageError, context_parallel_attention
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.search import step_search
from megatron.context_parallel.cluster.search.auto import headline, resolve
from megatron.context_parallel.cluster.search.candidates import Candidate, Workload, candidates
from megatron.context_parallel.cluster.search.layer_search import search_layers
from megatron.context_parallel.cluster.search.plainness import SURE, plainest
from megatron.context_parallel.cluster.search.planner import GroupDevices, fastest, memory, search
from megatron.context_parallel.cluster.simulate.one_pass import simulate
from megatron.context_parallel.cluster.step.attention_pass import attention_only, attention_seconds
from megatron.context_parallel.cluster.step.train_config import TrainConfig, loss_chunk
from megatron.context_parallel.commands import plan_search as plan_search_module
from megatron.context_parallel.commands.plan import main as plan_tool
from megatron.context_parallel.commands.plan_search import OFF, flags, kind_of, model_name
from megatron.context_parallel.commands.plan_search import main as plan_search
from megatron.context_parallel.plan.ir import Attend, Step
from megatron.context_parallel.strategies import Pass, parse_spec, register
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.trainer.arguments.auto import choose_strategy
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.arguments.preset_model import preset_model
from megatron.context_parallel.trainer.config.workload import run_of
from megatron.context_parallel.trainer.dry_run import describe
from tests.support.box import BOX, BOX_TEXT
from tests.support.exact import errors, exact, gradients, problem
from tests.support.ideal_model import MODEL

WORKLOAD = Workload(4096, 8, 4, 64)
HOST = replace(BOX, shared_cores=2, nics=replace(BOX.nics, processor_ns_per_byte=2, GB_s=0.1))
SLOW = replace(BOX, nodes=8, devices_per_node=1, inside=None, nics=replace(BOX.nics, per_node=1, GB_s=0.01))

PLANNED = {name for name, strategy in STRATEGIES.items() if strategy.planned}


def every(workload: Workload, n: int, **fixed) -> list:
    return [*candidates(workload, n, lambda size: 2.0, fixed)]


def seconds(spec: str, place: GroupDevices, workload: Workload) -> float:
    shape, how = workload.shape(place.n), {"heads": workload.heads, "kv_heads": workload.kv_heads}
    plans = [parse_spec(spec).plan(place.n, backward=backward, **how) for backward in (False, True)]
    more = workload.mask, workload.batch, workload.dtype, place.devices, place.others
    return sum(simulate(plan, place.cluster, shape, *more).seconds for plan in plans)


# -- candidates ------------------------------------------------------------------------------------------------------


def test_candidates_are_what_strategies_declare():
    found = every(WORKLOAD, 4)
    specs = [one.choice.spec for one in found if isinstance(one, Candidate)]
    assert len(specs) == len(set(specs)) == len(found)
    assert {spec.split(":")[0] for spec in specs} == PLANNED
    assert {"ulysses", "usp:head_parallel_size=2,layout=cyclic,placement=context-first"} <= {*specs}
    assert not any(spec.startswith("ring:head") for spec in specs)  # it is usp
    mesh = {spec for spec in specs if spec.startswith("mesh:grid=2x2") and "layout" not in spec}
    assert mesh == {"mesh:grid=2x2"} | {f"mesh:grid=2x2,q_transfer_blocks={cost}" for cost in (2.0, 4.0)}
    assert "loongtrain:inner_ring_size=2" in specs and "lightseq:balance=False,prefetch=False" in specs
    for one in found:
        assert one.choice.plan(4).layout == one.plans[0].layout and one.plans[1].backward
        assert parse_spec(one.choice.spec).spec == one.choice.spec


def test_what_cannot_run_is_rejected_with_a_reason():
    reasons = {one.reason for one in every(replace(WORKLOAD, length=24), 8) if not isinstance(one, Candidate)}
    assert any("the zigzag layout over 8 ranks needs a multiple of 16" in reason for reason in reasons)
    found = every(replace(WORKLOAD, heads=6, kv_heads=3), 4)
    refused = [one for one in found if not isinstance(one, Candidate)]
    assert refused and all("--cp-head-parallel-size" in one.reason and "6 heads" in one.reason for one in refused)
    least = max(memory(plan, WORKLOAD) for plan in choose_plans("ring", 8))
    some, none = (search(WORKLOAD, GroupDevices(BOX), room=room, max_simulated=2) for room in (least, 1))
    assert some.ranked and any("of memory" in one.reason for one in some.rejected)
    with pytest.raises(UsageError, match=r"--cp-strategy auto: no strategy works for this run .*memory"):
        _ = none.best


def choose_plans(spec: str, n: int, workload: Workload = WORKLOAD) -> list:
    how = {"heads": workload.heads, "kv_heads": workload.kv_heads}
    return [parse_spec(spec).plan(n, backward=backward, **how) for backward in (False, True)]


def test_wrong_strategies_of_users_are_rejected():
    with mock.patch.dict(STRATEGIES, {"ring": STRATEGIES["ring"]}, clear=True):

        @register("idle", layouts=("zigzag",))
        def idle(at: Pass):
            yield Step((), (Attend((at.rank,), (at.rank,)),))

        @register("early", layouts=("zigzag",))
        def early(at: Pass):
            yield from STRATEGIES["ring"].write(at) if at.rank < 1 / (4 - at.n) else ()

        @register("late", layouts=("zigzag",))
        def late(at: Pass):
            yield from STRATEGIES["ring"].write(at)
            yield 1 / (4 - at.n)

        found = search(WORKLOAD, GroupDevices(BOX.part(4)), {"head_parallel_size": 1})
    assert {spec.split(":")[0] for spec in found.ranked} == {"ring"}
    assert {one.spec: one.reason for one in found.rejected} == {
        "idle": "--cp-strategy idle: rank 0, step 1: O chunk 0 ends without the block of chunk 1",
        "early": "--cp-strategy early: ZeroDivisionError: division by zero",
        "late": "--cp-strategy late: ZeroDivisionError: division by zero",
    }


def test_options_that_are_given_bind():
    fixed = {"layout": "cyclic", "head_parallel_size": 2, "partials_in_16_bits": True}
    found = search(WORKLOAD, GroupDevices(BOX), fixed, max_simulated=3)
    assert found.ranked
    for spec, option in product(found.ranked, fixed):
        assert f"{option}={fixed[option]}" in spec


def test_rounds_of_heads_where_they_are_faster_or_fit():
    place = GroupDevices(replace(SLOW, nics=replace(SLOW.nics, GB_s=0.1)))
    fixed = {"head_parallel_size": 8, "layout": "contiguous"}
    workload = replace(WORKLOAD, length=16384, heads=32, kv_heads=32)
    found = search(workload, place, fixed)
    assert [*found.ranked] == ["ulysses:head_rounds=4", "ulysses:head_rounds=2", "ulysses"]
    assert found.ranked[found.best].seconds < found.ranked["ulysses"].seconds / 1.15
    room = found.ranked["ulysses"].memory - 1
    assert [*search(workload, place, fixed, room=room).ranked] == ["ulysses:head_rounds=4"]
    assert [*search(workload, place, fixed | {"head_rounds": 1}).ranked] == ["ulysses"]


def test_rounds_of_tokens_where_a_rank_has_one_head():
    place = GroupDevices(replace(SLOW, nics=replace(SLOW.nics, GB_s=0.5)))
    fixed = {"head_parallel_size": 8, "layout": "cyclic"}
    found = search(replace(WORKLOAD, length=16384, heads=8, kv_heads=8), place, fixed)
    assert found.best == "ulysses:layout=cyclic,token_rounds=8"
    assert search(replace(WORKLOAD, length=16384, heads=8, kv_heads=8, mask=Mask(False)), place, fixed).best == (
        "ulysses:layout=cyclic"
    )


# -- bounds and ranking ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [BOX, HOST, SLOW], ids=["box", "host", "slow"])
def test_nothing_is_faster_than_its_bound(cluster):
    ways = {one.choice.spec: one.plans for one in every(WORKLOAD, 8)[::9]}
    _, least = fastest(ways, GroupDevices(cluster), WORKLOAD, max_simulated=0)
    assert least.keys() == ways.keys()
    for spec, bound in least.items():
        assert 0 < bound <= seconds(spec, GroupDevices(cluster), WORKLOAD) * (1 + 1e-9), spec


def test_the_bound_is_reached_where_one_link_does_all():
    """Two ranks: keys cross the link once forward; once, and their gradients in float32, backward."""
    cluster = replace(SLOW, nodes=2)
    _, least = fastest({"ring": choose_plans("ring", 2)}, GroupDevices(cluster), WORKLOAD, max_simulated=0)
    keys = 2 * 2048 * 4 * 64
    assert least["ring"] == pytest.approx((2 * keys + (2 + 4) * keys) / 0.01e9, rel=1e-3)


def test_the_fastest_is_that_of_all():
    """Against the simulation of every candidate."""
    fixed = {"head_parallel_size": 1, "layout": "zigzag"}
    found = search(WORKLOAD, GroupDevices(SLOW), fixed)
    times = {
        one.choice.spec: seconds(one.choice.spec, GroupDevices(SLOW), WORKLOAD) for one in every(WORKLOAD, 8, **fixed)
    }
    best = next(spec for spec in found.ranked if "+" not in spec)
    assert found.ranked[best].seconds == pytest.approx(times[best])
    assert found.ranked[best].seconds <= min(times.values()) * (1 + 1e-9)
    assert best.startswith("mesh") and times["ring"] > 1.4 * times[best]
    assert [*found.ranked] == [*search(WORKLOAD, GroupDevices(SLOW), fixed).ranked]
    assert len(found.slower) > len(found.ranked)


def test_other_groups_take_their_part_of_a_nic():
    shared = replace(BOX, nics=replace(BOX.nics, per_node=1, GB_s=0.01))
    alone, beside = GroupDevices(shared, (0, 4)), GroupDevices(shared, (0, 4), ((1, 5), (2, 6), (3, 7)))
    ways = {"ring": choose_plans("ring", 2)}
    times = [fastest(ways, place, WORKLOAD)[0]["ring"].seconds for place in (alone, beside)]
    assert times[1] == pytest.approx(4 * times[0], rel=0.2)


def test_passes_may_have_different_strategies():
    """The best forward and the best backward pass with one placement are combined if that pays; results are exact."""
    found = search(WORKLOAD, GroupDevices(SLOW), {"head_parallel_size": 1}, max_simulated=10**6)
    for spec, mixed in found.ranked.items():
        if "+" in spec:
            first, second = (found.ranked[part] for part in spec.split("+"))
            assert mixed.passes == (first.passes[0], second.passes[1])
            assert mixed.seconds < 0.99 * min(first.seconds, second.seconds)
            parse_spec(spec).plan(8)
    cp = AllRanks(4, "mesh:grid=2x2+attention2d:grid=4x1,overlap=no")
    assert [cp.choice.plan(4, backward=backward).name for backward in (False, True)] == ["mesh", "attention2d"]
    got = gradients(partial(context_parallel_attention, cp=cp, return_lse=True), *problem(4, 4, 4, torch.float32))
    assert max(errors(got, exact(4, 4, 4, torch.float32, True))) < 2e-6
    assert cp.choice.spec == "mesh:grid=2x2+attention2d:grid=4x1,overlap=False"
    with pytest.raises(UsageError, match=r"--cp-strategy ulysses\+ring: the forward pass has .* size 4, .* size 1"):
        parse_spec("ulysses+ring").plan(4)


def test_a_sweep_has_every_strategy_and_twelve_cases():
    cases = [*sweep(WORKLOAD, BOX.part(4), {}, 14)]
    assert 12 <= len(cases) <= 14 and {case.split(":")[0] for case in cases} == PLANNED


# -- ranks agree -----------------------------------------------------------------------------------------------------


def _agreed(cluster: str, layout: str | None) -> str:
    options = {"head_parallel_size": 1, "workload": WORKLOAD, "cluster": cluster}
    choice = resolve("auto", layout=layout, **options)
    assert ContextParallel(choice).choice.spec == choice.spec
    return choice.spec


def _refused(**options) -> str:
    with pytest.raises(UsageError) as refused:
        resolve("auto", **options)
    return str(refused.value)


def test_all_ranks_take_the_same(ranks, tmp_path):
    path = tmp_path / "box.yaml"
    path.write_text(BOX_TEXT)
    best = search(WORKLOAD, GroupDevices(BOX.part(4)), {"layout": "cyclic", "head_parallel_size": 1}).best
    assert ranks(4, _agreed, str(path), "cyclic") == [best] * 4
    for said in ranks(2, partial(_refused, workload=WORKLOAD, cluster="nowhere")):
        assert said.startswith("--cp-cluster nowhere: no such file or preset")
    for said in ranks(2, partial(_refused, workload=WORKLOAD, grid=(2, 1))):
        assert said == "grid=(2, 1): --cp-strategy auto chooses the options of strategies; leave it out"
    for said in ranks(2, _refused):
        assert said.startswith("--cp-strategy auto: for which sizes? Give workload=Workload(")
    assert resolve("mesh", layout="cyclic").spec == "mesh:layout=cyclic"  # a named strategy needs no group
    with pytest.raises(UsageError, match=r"^--cp-strategy auto: give the result of resolve\('auto', "):
        AllRanks(2, "auto")


# -- the trainer and the tools ---------------------------------------------------------------------------------------

TRAINER = "--preset tiny-llama --micro-batch-size 1 --dry-run --context-parallel-size 4 --cp-strategy auto"


def _settled(flags: str, world: str) -> tuple:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", world)
        args = parse_args(flags.split())
        assert not args.cp_layers
        args = choose_strategy(args)
    return args.cp_layers[0].spec, args.cp_strategy, args.cp_layout, args.cp_cluster


def test_trainer_takes_what_is_fastest(ranks, tmp_path, capsys):
    path = tmp_path / "box.yaml"
    path.write_text(BOX_TEXT)
    flags = f"{TRAINER} --cp-cluster {path}"
    describe(parse_args(flags.split()))
    said = capsys.readouterr().out
    spec = re.search(r"--cp-strategy auto: chose --cp-strategy (\S+); ", said)[1]
    assert f"{spec}, " in said.split("strategy and layout")[1]
    layout = parse_spec(spec).layout
    assert ranks(4, _settled, flags, "4") == [(spec, spec, layout, None)] * 4
    assert parse_args(f"{TRAINER.replace('auto', spec)}".split()).cp_layers[0].spec == spec
    describe(parse_args(TRAINER.split()))
    assert "--cp-strategy auto: the run measures its cluster when it starts" in capsys.readouterr().out
    some = f"{flags} --window-size 64,0 --window-attn-skip-freq 2 --cp-layout contiguous"
    describe(parse_args(some.split()))
    assert "--cp-strategy auto: chose --cp-strategy " in capsys.readouterr().out
    with pytest.raises(UsageError, match="auto: for documents it compares strategies for one window"):
        parse_args(f"{some} --reset-attention-mask".split())


@pytest.mark.parametrize(
    "flags,message",
    [
        ("--cp-grid 2x2", "--cp-grid 2x2: --cp-strategy auto chooses it; leave it out"),
        ("--cp-cluster nowhere", "--cp-cluster nowhere: no such file or preset; give a .yaml file, or one of "),
        ("--cp-layout striped", "--cp-layout striped: unknown"),
        ("--seq-length 510", "--seq-length 510: its split over 4 context-parallel ranks needs a multiple of 4"),
    ],
)
def test_trainer_refuses(flags, message):
    with pytest.raises(UsageError) as refused:
        parse_args(f"{TRAINER} {flags}".split())
    assert str(refused.value).startswith(message)


def test_a_run_has_a_cluster_only_for_a_choice_or_documents():
    flags = TRAINER.replace("--dry-run", "--mock-data --lr 1e-3 --train-iters 1")
    with pytest.raises(UsageError, match=r"^--cp-cluster dgx-h100: needs --cp-strategy auto, "):
        parse_args(f"{flags} --cp-strategy ring --cp-cluster dgx-h100".split())


def test_a_run_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "box.yaml"
    path.write_text(BOX_TEXT)  # devices of 1 GiB
    flags = TRAINER.replace("tiny-llama", "llama3-8b")
    args = parse_args(f"{flags} --seq-length 4096 --cp-cluster {path}".split())
    with pytest.raises(
        UsageError,
        match=r"--cp-strategy auto: without attention the run already needs an .* has 0.94 GiB for tensors; ",
    ):
        describe(args)


def test_what_is_chosen_fits(monkeypatch, capsys):
    """Of FSDP2, whose activations go layer by layer, with the most of them, and with the kernel of a block."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    flags = TRAINER.replace("tiny-llama", "llama3-8b").replace("size 4", "size 8") + " --use-torch-fsdp2 --bf16"
    flags += " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --cp-cluster dgx-h100"
    flags += " --seq-length 1310720 --cp-layout zigzag --cp-head-parallel-size"
    with pytest.raises(UsageError, match=r"attention needs 1[5-9]\.\d GiB of memory, but only 15 GiB are left"):
        describe(parse_args(f"{flags} 1".split()))
    describe(parse_args(f"{flags} 8".split()))
    assert "fits: " in capsys.readouterr().out.replace("not fit", "")


def test_plan_tool_takes_auto(capsys):
    sizes = ["--ranks", "4", "--seq-length", "4096", "--num-attention-heads", "8"]
    plan_tool(["auto", *sizes, "--cluster", "dgx-h100"])
    said = capsys.readouterr().out
    spec = re.search(r"chose --cp-strategy (\S+); ", said)[1]
    assert f"{spec}, {parse_spec(spec).layout} layout" in said
    with pytest.raises(UsageError, match="auto: needs a cluster; give --cluster"):
        plan_tool(["auto", *sizes])


def cache_one(function):
    """The function, whose first result is that of all calls."""
    results = []

    def cached(*args):
        if not results:
            results.append(function(*args))
        return results[0]

    return cached


SEARCH = ["--model", "llama3-8b", "--seq-length", "128K", "--cluster", "dgx-h100", "--nodes", "1"]


def test_plan_search(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(plan_search_module, "found_by", cache_one(plan_search_module.found_by))  # both find the same
    plan_search([*SEARCH, "--why", "--longest"])
    said = capsys.readouterr()
    table, rejected = said.out.split("rejected\n")
    rows = [line.split() for line in table.splitlines() if re.match(r"\d+\*? +[\d.]+ ", line)]
    names = [row[10].split(":")[0] for row in rows]
    lengths = [int(row[9].replace(",", "")) for row in rows]
    times = [float(row[1]) for row in rows]
    best = len(PLANNED)
    assert {*names} == {*names[:best]} == PLANNED
    assert times[:best] == sorted(times[:best]) and {*names[best:]} == {names[0]}
    memory = [float(row[7]) for row in rows[best:]]
    assert memory == sorted(memory, reverse=True) and memory[0] < float(rows[0][7])
    assert min(lengths) > 131072 and lengths[0] < lengths[best] and lengths[best:] == sorted(lengths[best:])
    ring = times[names.index("ring")]
    for row, seconds in zip(rows, times, strict=True):
        assert float(row[4]) == pytest.approx(ring / seconds, abs=0.01)
        assert float(row[5].replace(",", "")) == pytest.approx(131072 / 8 / seconds, rel=1e-3)
    assert "predicting the strategies for 8 x H100" in said.err
    assert "needs more than 94% of the 80 GiB of a device" in rejected
    assert {row[2] for row in rows} == {"6"} and "6 % for others, 9 % for tensor-parallel ranks or FP8" in rejected
    flags = re.search(r"To train with the .*: (--.*)", rejected)[1]
    parse_args(f"--preset llama3-8b --micro-batch-size 1 --seq-length 131072 --dry-run {flags}".split())
    trace = tmp_path / "t.json"
    plan_search([*SEARCH, "--explain", "1", "--timeline", str(trace)])
    said = capsys.readouterr().out
    parts = re.findall(r"^(.+?)  +([\d.e-]+) +([\d.]+)%$", said, re.MULTILINE)
    assert sum(float(share) for *_, share in parts) == pytest.approx(100, abs=1)
    assert sum(float(part) for _, part, _ in parts) == pytest.approx(times[0], rel=1e-2)
    assert json.loads(trace.read_text())["traceEvents"]


def test_parallel_sizes_that_cannot_be_fast_are_not_tried(monkeypatch):
    """Every run takes at least as long as said before its attention is simulated, so the best is found without some."""
    model = preset_model("tiny-llama", 4096)
    cluster, base = load_cluster("dgx-h100").part(2), TrainConfig(seq_length=4096, global_batch_size=2)
    monkeypatch.setattr(step_search, "SIMULATED_OF_MANY", 1)
    found = []
    for far in (math.inf, 1.0):
        monkeypatch.setattr(step_search, "FAR", far)
        found.append(step_search.search_steps(model, cluster, base, every_split=True))
    every, some = found
    assert some.ranked[0] == every.ranked[0] and len(some.ranked) < len(every.ranked)
    assert {one.run.micro_batch_size for one in every.ranked} == {1, 2}
    for run, forecast, _ in every.ranked:
        assert step_search._least(model, run, cluster) <= forecast.seconds * (1 + 1e-9)


def test_runs_of_every_dimension_are_told_in_flags_that_the_trainer_reads():
    model, cluster = preset_model("llama3-8b", 131072), load_cluster("dgx-h100")
    sizes = {"context_parallel_size": 16, "pipeline_model_parallel_size": 2, "micro_batch_size": 2}
    base = TrainConfig(seq_length=131072, global_batch_size=8, **sizes)
    runs = [*step_search._variants(model, base, cluster)]
    assert {run.virtual_stages for run in runs} == {1, 2, 4}
    assert len({replace(run, virtual_pipeline_model_parallel_size=None) for run in runs}) == 5 * 6
    assert len({attention_only(model, run) for run in runs}) == 1  # attention is simulated once for all
    for run in (run for run in runs if run.offload_checkpoints and run.virtual_stages == 1):
        if step_search.FeasibleRun(run, None).trains:
            args = parse_args(f"--preset llama3-8b --seq-length 131072 --dry-run {flags(run, model)}".split())
            assert (args.offload_checkpoints, args.offload_kept) == (True, bool(run.recompute_whitelist))
    run = next(run for run in runs if run.virtual_stages == 4 and run.recompute_modules)
    words = "--preset llama3-8b --seq-length 131072 --global-batch-size 8 --dry-run "
    args = parse_args((words + flags(run, model)).split())
    assert (args.virtual_pipeline_model_parallel_size, args.micro_batch_size) == (4, 2) and OFF[kind_of(run)] == 14
    assert tuple(args.recompute_modules) == run.recompute_modules
    uneven = step_search._variants(model, replace(base, global_batch_size=6), cluster)
    assert {run.virtual_stages for run in uneven} <= {1}
    copied = next(run for run in runs if run.num_distributed_optimizer_instances > 1)
    args = parse_args((words + flags(copied, model)).split())
    assert args.num_distributed_optimizer_instances == 2  # a node has 8 of the 16 ranks
    experts = replace(model, num_experts=8, moe_ffn_hidden_size=64)
    modules = {run.recompute_modules for run in step_search._variants(experts, base, cluster)}
    assert modules == {(), ("layernorm", "moe")}
    sharded = replace(experts, expert_model_parallel_size=4)
    runs = [*step_search._variants(sharded, replace(base, moe_token_dispatcher_type="alltoall"), cluster)]
    assert {run.data_parallel_sharding_strategy for run in runs} == {"no_shard", "optim"}
    words += f"{flags(runs[0], sharded)} --num-experts 8 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 0.01"
    args = parse_args(words.split())
    assert (args.expert_model_parallel_size, args.moe_token_dispatcher_type) == (4, "alltoall")


def test_the_flags_of_a_run_give_that_run(monkeypatch):
    """A dry run with them predicts the same memory and time."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    model, cluster = preset_model("llama3-8b", 131072), load_cluster("dgx-h100").part(8)
    how = {"cp_strategy": "ulysses", "cross_entropy_chunk_size": loss_chunk(model.padded_vocab_size)}
    base = TrainConfig(seq_length=131072, context_parallel_size=8, **how)
    words = "--preset llama3-8b --seq-length 131072 --micro-batch-size 1 --dry-run --device-memory 80GB"
    for run, dtype in product(step_search._variants(model, base, cluster), ("bf16", "fp16")):
        own = replace(run, dtype=dtype)
        given = f"{words} --{dtype} {flags(own, model)}".split()
        if step_search.FeasibleRun(own, None).trains:
            assert run_of(parse_args(given)) == own
        else:
            with pytest.raises(UsageError, match="--fp16: not supported with FSDP"):
                parse_args(given)


def test_fsdp2_shards_what_megatron_fsdp_cannot():
    """It works with tensor-parallel ranks, and no rank builds the whole model."""
    model, cluster = preset_model("llama3-8b", 131072), load_cluster("dgx-h100").part(8)
    small = replace(cluster, device=replace(cluster.device, memory_GiB=15.0))
    base = TrainConfig(seq_length=131072, context_parallel_size=4, data_parallel_size=2, global_batch_size=2)
    tensor = replace(base, tensor_model_parallel_size=2, data_parallel_size=1, sequence_parallel=True)
    for own, place, by_fsdp2 in ((base, cluster, False), (base, small, True), (tensor, cluster, True)):
        runs = [run for run in step_search._variants(model, own, place) if run.use_torch_fsdp2]
        assert {run.data_parallel_sharding_strategy for run in runs} == ({"optim_grads_params"} if by_fsdp2 else set())
        for run in runs:
            assert step_search.FeasibleRun(run, None).trains
            words = f"--preset llama3-8b --micro-batch-size 1 --seq-length 131072 --dry-run {flags(run, model)}"
            args = parse_args(words.split())
            assert (args.use_torch_fsdp2, args.tensor_model_parallel_size) == (True, own.tensor_model_parallel_size)


def test_runs_in_fp8_are_those_that_the_trainer_accepts():
    model, cluster = preset_model("llama3-8b", 131072), load_cluster("dgx-h100")
    how = {"fp8": "hybrid", "implementation": "transformer_engine"}
    base = TrainConfig(seq_length=131072, context_parallel_size=8, **how)
    runs = [step_search.FeasibleRun(run, None) for run in step_search._variants(model, base, cluster)]
    train = [one.run for one in runs if one.trains]
    assert len(runs) == 4 * 2 and {run.data_parallel_sharding_strategy for run in train} == {"no_shard", "optim"}
    for run in train:
        words = f"--preset llama3-8b --micro-batch-size 1 --seq-length 131072 --dry-run {flags(run, model)}"
        assert parse_args(words.split()).fp8 == "hybrid" and OFF[kind_of(run)] == 9


def test_models_are_read_from_a_config_of_huggingface(tmp_path):
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": "bfloat16",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_name(str(tmp_path)) == str(tmp_path)
    read, preset = (preset_model(name, 2**17, 2) for name in (str(tmp_path), "llama3-8b"))
    assert replace(read, padded_vocab_size=0) == replace(preset, padded_vocab_size=0)
    assert read.padded_vocab_size == 128256


BRIDGE = """
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama3ModelProvider8B
  activation_func: {_call_: false, _target_: torch.nn.functional.silu}
  add_bias_linear: false
  ffn_hidden_size: 14336
  gated_linear_unit: true
  hidden_size: 4096
  kv_channels: 128
  make_vocab_size_divisible_by: 128
  multi_latent_attention: false
  normalization: RMSNorm
  num_attention_heads: 32
  num_layers: 32
  num_moe_experts: null
  num_query_groups: 8
  position_embedding_type: rope
  rotary_base: 500000.0
  share_embeddings_and_output_weights: false
  should_pad_vocab: true
  vocab_size: 128256
  window_size: null
train: {global_batch_size: 512}
"""


def test_models_are_read_from_a_recipe_of_megatron_bridge(tmp_path):
    recipe = tmp_path / "run_config.yaml"
    recipe.write_text(BRIDGE)
    assert model_name(str(recipe)) == str(recipe)
    read, preset = (preset_model(name, 2**17, 2) for name in (str(recipe), "llama3-8b"))
    assert replace(read, padded_vocab_size=0) == replace(preset, padded_vocab_size=0)
    assert read.padded_vocab_size == 128256  # a multiple of 128 x 2
    recipe.write_text(BRIDGE.replace("num_moe_experts: null", "num_moe_experts: 8\n  moe_ffn_hidden_size: 64"))
    assert (preset_model(str(recipe), 64).num_experts, preset_model(str(recipe), 64).moe_ffn_hidden_size) == (8, 64)


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("multi_latent_attention: false", "multi_latent_attention: true", "multi_latent_attention True is not supp"),
        ("llama.llama_provider", "mamba.mamba_provider", "_target_ megatron.bridge.models.mamba.* is not supported"),
        ("functional.silu", "functional.relu", "activation_func relu .gated MLP. is not supported; use gated silu"),
        ("  num_layers: 32\n", "", "num_layers is missing; give the run_config.yaml of a run"),
        ("window_size: null", "window_size: all", "window_size all cannot be read; give two numbers, such as"),
        ("model:", "encoder:", "no model._target_; give the run_config.yaml of a Megatron-Bridge run"),
        ("model:", "model: [", "not YAML"),
    ],
)
def test_recipes_that_cannot_be_read_are_refused(old, new, message, tmp_path):
    recipe = tmp_path / "run_config.yaml"
    recipe.write_text(BRIDGE.replace(old, new))
    with pytest.raises(UsageError, match=f"run_config.yaml: (model.)?{message}"):
        preset_model(str(recipe), 64)


def test_plan_search_places_documents(capsys):
    plan_search([*SEARCH, "--documents", "24576x5,8192"])
    said = capsys.readouterr().out
    assert "6 documents of 8192 to 24576 tokens" in said
    rows = [line.split() for line in said.splitlines() if re.match(r"\d+\*? +[\d.]+ ", line)]
    placed = next(row for row in rows if "placed" in row)
    static = [row for row in rows if "placed" not in row]
    assert PLANNED | {"direct"} == {row[8].split(":")[0] for row in static} and placed[8].startswith("direct")
    best = min(float(row[1]) for row in static)
    said = re.search(r"placed: (\S+) s an iteration, with direct.*; in a .* layout (\S+) s, .* is (\S+) times", said)
    assert (said[1], float(said[2])) == (placed[1], best)
    assert float(said[3]) == pytest.approx(best / float(placed[1]), abs=0.01)
    run = TrainConfig(seq_length=64, cp_strategy="direct")
    words = flags(run, preset_model("llama3-8b", 64), placed=True)
    assert words.endswith("--cp-strategy direct --reset-attention-mask --cp-place-documents")


@pytest.mark.parametrize(
    "more,message",
    [
        (["--model", "llama9"], "--model llama9: unknown; choose "),
        (["--seq-length", "long"], "--seq-length long: need a number of tokens, such as 131072, 128K or 1M"),
        (["--nodes", "0"], "--nodes 0: need a whole number, 1 or more"),
        (["--data-parallel-size", "3"], "--data-parallel-size 3: "),
        (["--cluster", "dgx-a100", "--fp8-format", "hybrid"], "--fp8-format hybrid: A100 SXM 80 GB has no device"),
        (
            ["--expert-model-parallel-size", "2"],
            "--expert-model-parallel-size 2: does not divide the missing ",
        ),
        (["--timeline", "t.json"], "--timeline t.json: needs --explain 1; add that"),
        (["--explain", "own.py:mine"], "--explain own.py:mine: of strategies of your own only installed ones are "),
        (["--documents", "7x8", "--micro-batch-size", "2"], "--micro-batch-size 2: a micro batch of --documents is "),
    ],
)
def test_plan_search_refuses(more, message):
    with pytest.raises(UsageError) as refused:
        plan_search([*SEARCH, *more])
    assert str(refused.value).startswith(message)


def test_a_mask_counts():
    """With a window of a chunk a contiguous ring sends one chunk; nothing sends less. With a smaller one it sends rows.

    Bounds and times count these.
    """
    workload = replace(WORKLOAD, mask=Mask(True, (512, 0)), kv_heads=8)
    assert search(workload, GroupDevices(SLOW), {"head_parallel_size": 1}).best.startswith(
        ("ring:layout=contiguous", "lightseq")
    )
    narrow = replace(workload, mask=Mask(True, (128, 0)))
    model = replace(MODEL, num_attention_heads=8, num_query_groups=8, kv_channels=64, window_size=128)
    run = TrainConfig(seq_length=4096, context_parallel_size=8)
    fixed = {"head_parallel_size": 1, "layout": "contiguous"}
    found = search(narrow, GroupDevices(SLOW), fixed, max_simulated=8).ranked
    for spec in ("lightseq", "ring:layout=contiguous"):
        how = model, replace(run, cp_strategy=spec), SLOW
        passes = [attention_seconds(*how, backward).seconds for backward in (False, True)]
        assert found[spec].seconds == pytest.approx(sum(passes), rel=1e-9)
    to_itself = replace(workload, mask=Mask(True, (0, 0)))  # a block of two chunks has no pairs
    assert search(to_itself, GroupDevices(SLOW), {"layout": "contiguous"}, max_simulated=1).best
    ways = {one.choice.spec: one.plans for one in every(narrow, 8) if isinstance(one, Candidate)}
    some = dict([*ways.items()][::40])
    _, least = fastest(some, GroupDevices(SLOW), narrow, max_simulated=0)
    times, _ = fastest(some, GroupDevices(SLOW), narrow, max_simulated=len(some))
    assert all(least[spec] <= found.seconds * (1 + 1e-9) for spec, found in times.items())


def test_layers_with_and_without_a_window_count_by_their_number():
    """A choice for one in four layers without a window, against candidates."""
    model = replace(MODEL, num_attention_heads=8, num_query_groups=8, kv_channels=64, window_size=512, full_layers=1)
    run, fixed = (
        TrainConfig(seq_length=4096, context_parallel_size=8),
        {"head_parallel_size": 1, "layout": "contiguous"},
    )
    kinds = (replace(model, window_size=None, full_layers=0), 1), (replace(model, full_layers=0), 3)

    def mean(spec: str) -> float:
        own = replace(run, cp_strategy=spec), SLOW
        return sum(
            layers / 4 * attention_seconds(kind, *own, backward).seconds
            for kind, layers in kinds
            for backward in (False, True)
        )

    found = search_layers(model, run, GroupDevices(SLOW), fixed, 2**30)
    first = next(iter(found.ranked))
    assert found.ranked[first].seconds == pytest.approx(mean(first))
    workload = Workload(4096, 8, 8, 64, mask=Mask(True, (512, 0)))
    assert mean(first) <= min(mean(one.choice.spec) for one in every(workload, 8, **fixed)[::4]) * (1 + 1e-9)


def test_a_more_complicated_choice_must_gain_more_than_predictions_are_off():
    seconds = {"mesh": 1.0, "usp:head_parallel_size=2,placement=context-first": 1.02, "usp:head_parallel_size=2": 1.025}
    assert plainest(seconds) == "usp:head_parallel_size=2"
    assert plainest(seconds | {"ring": 1.04}) == "usp:head_parallel_size=2"
    assert plainest(seconds | {"ring": 1.02, "attention2d:grid=8x1": 1.0}) == "ring"
    assert plainest({"ring+mesh:grid=2x4": 0.98, "ring": 1.0}) == "ring"
    found = search(WORKLOAD, GroupDevices(BOX), {"head_parallel_size": 1})
    best, fastest = (found.ranked[spec].seconds for spec in (found.best, next(iter(found.ranked))))
    assert fastest <= best <= (1 + SURE) * fastest
    assert f"chose --cp-strategy {found.best}" in headline(found)
