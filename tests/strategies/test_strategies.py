"""How strategies are declared, named and chosen, and the messages they are written with."""

import random
import sys
from dataclasses import fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import Annotated

import pytest

from megatron.context_parallel import STRATEGIES, AllRanks, UsageError
from megatron.context_parallel.commands.plan import main as plan_tool
from megatron.context_parallel.plan.ir import Attend, PlanError, Recv, Send, Step, T
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.strategies import Option, Pass, Ring, parse_spec, register
from megatron.context_parallel.strategies.declaration import FLAGS
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.config.context_parallel_flags import STRATEGY_OPTIONS, strategy_options
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.dry_run import attention_bytes

ROOT = Path(__file__).parents[2]
OWN = """
from typing import Annotated
from megatron.context_parallel.plan.ir import Attend, Step
from megatron.context_parallel.strategies import Option, register

@register("{name}", layouts=("cyclic",))
def {name}(at, *, hops: Annotated[int, Option("how far")] = 1):
    yield Step(attend=(Attend((at.rank,), (at.rank,)),))
"""


@pytest.fixture(autouse=True)
def registered():
    """Leaves the strategies and modules as they were."""
    strategies, modules = dict(STRATEGIES), set(sys.modules)
    yield
    STRATEGIES.clear()
    STRATEGIES.update(strategies)
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def one_line(refused: pytest.ExceptionInfo, message: str) -> None:
    assert "\n" not in str(refused.value) and message in str(refused.value)


# -- declared -------------------------------------------------------------------------------------------------


def no_pass():
    yield Step()


def pass_by_keyword(*, at: Pass):
    yield Step()


def positional(at: Pass, hops: Annotated[int, Option("how far")] = 1):
    yield Step()


def no_default(at: Pass, *, hops: Annotated[int, Option("how far")]):
    yield Step()


def no_option(at: Pass, *, hops: int = 1):
    yield Step()


def unknown_type(at: Pass, *, hops: Annotated[bytes, Option("how far")] = b"1"):
    yield Step()


@pytest.mark.parametrize(
    "name,layouts,function,message",
    [
        ("ring", ("zigzag",), lambda at: (), "strategy ring: the name is taken; register it under another"),
        ("own", ("striped", "cyclic"), lambda at: (), "strategy own: layouts striped; choose among contiguous"),
        ("own", (), lambda at: (), "strategy own: layouts missing; choose among contiguous, zigzag, cyclic"),
        ("own", ("cyclic",), no_pass, "strategy no_pass: its first parameter must be the pass, such as `at: Pass`"),
        ("own", ("cyclic",), pass_by_keyword, "strategy pass_by_keyword: its first parameter must be the pass"),
        ("own", ("cyclic",), positional, "strategy positional: declare the option hops after a `*`, with a type and"),
        ("own", ("cyclic",), no_default, "strategy no_default: declare the option hops after a `*`"),
        ("own", ("cyclic",), no_option, "strategy no_option: declare the option hops after a `*`"),
        ("own", ("cyclic",), unknown_type, "strategy unknown_type: declare the option hops after a `*`"),
        (
            "own",
            ("cyclic",),
            STRATEGIES["ring"],
            "strategy of type Strategy: need a function that yields steps, such as",
        ),
        ("own", ("cyclic",), partial(positional, hops=2), "strategy of type partial: need a function"),
    ],
)
def test_what_declares_no_strategy_is_refused(name, layouts, function, message):
    before = dict(STRATEGIES)
    with pytest.raises(UsageError) as refused:
        register(name, layouts)(function)
    one_line(refused, message)
    assert before == STRATEGIES


@pytest.mark.parametrize(
    "name,arguments,message",
    [
        ("a:b", {}, "strategy 'a:b': need a name of letters, digits, _ and -, such as my_ring"),
        ("auto", {}, "strategy 'auto': need a name"),
        ("", {}, "strategy '': need a name"),
        ("own.py", {}, "strategy 'own.py': need a name"),
        ("own", {"layouts": "zigzag"}, "strategy own: layouts 'zigzag', not a tuple; choose among contiguous, zigzag"),
        ("own", {"channels": "ring"}, "strategy own: channels 'ring'; give a tuple of names, such as (\"ring\",)"),
        ("own", {"channels": ("ring", "")}, "strategy own: channels ('ring', ''); give a tuple of names"),
        ("own", {"channels": ("heads",)}, "strategy own: channel heads: head swaps use it; choose another name"),
        ("own", {"head_parallel": "some"}, "strategy own: head_parallel 'some'; choose optional, required or all"),
        ("own", {"period": 0}, "strategy own: period 0; give a number of ranks, such as 1, or a function"),
        ("own", {"period": True}, "strategy own: period True; give a number of ranks"),
        ("own", {"in_token_rounds": True}, 'own: in_token_rounds needs head_parallel="all" and an option token_rounds'),
    ],
)
def test_wrong_arguments_of_register_are_refused(name, arguments, message):
    with pytest.raises(UsageError) as refused:
        register(name, **{"layouts": ("zigzag",), **arguments})(lambda at: ())
    one_line(refused, message)


def common_name(at: Pass, *, layout: Annotated[str, Option("its own")] = "x"):
    yield Step()


def named_as_a_flag(at: Pass, *, cluster: Annotated[str, Option("its own")] = "x"):
    yield Step()


def named_as_a_switch(at: Pass, *, overlap: Annotated[int, Option("its own")] = 1):
    yield Step()


def switch_named_as_a_value(at: Pass, *, grid: Annotated[bool, Option("its own")] = False):
    yield Step()


def wrong_default(at: Pass, *, hops: Annotated[int, Option("how far", example=2)] = 0):
    yield Step()


@pytest.mark.parametrize(
    "function,message",
    [
        (common_name, "strategy own: option layout: every strategy has it; choose another name"),
        (named_as_a_flag, "strategy own: option cluster: the trainer has another cp_cluster; choose another name"),
        (named_as_a_switch, "option overlap: --cp-overlap is a switch of attention2d; choose another name"),
        (switch_named_as_a_value, "option grid: --cp-grid is no switch of attention2d; choose another name"),
        (wrong_default, "wrong_default: the default of the option hops: 0: need a whole number, 1 or more, such as 2"),
    ],
)
def test_options_that_nobody_could_give_are_refused(function, message):
    with pytest.raises(UsageError) as refused:
        register("own", ("zigzag",))(function)
    one_line(refused, message)


def test_names_of_the_trainer_are_known():
    taken = {field.name[3:] for field in fields(Arguments) if field.name.startswith("cp_")}
    assert {*FLAGS} == taken - STRATEGY_OPTIONS.keys()


def test_an_option_of_a_user_means_what_it_says():
    """Also one that is named like one of this package; of two with choices, the flag takes those of both."""

    @register("counted", layouts=("zigzag", "cyclic"))
    def counted(at: Pass, *, token_rounds: Annotated[int, Option("its own")] = 1):
        yield from STRATEGIES["ring"].write(at)

    @register("worded", layouts=("zigzag",))
    def worded(at: Pass, *, token_rounds: Annotated[str, Option("its own", choices=("few", "many"))] = "few"):
        yield Step(attend=(Attend((at.rank,), (at.rank,)),))

    @register("rounds", layouts=("cyclic",), channels=(), head_parallel="all", in_token_rounds=True)
    def rounds(at: Pass, *, token_rounds: Annotated[int, Option("of the plan")] = 1):
        yield Step(attend=(Attend((0,), (0,)),))

    for layout in ("zigzag", "cyclic"):
        assert counted.plan(4, layout=layout, head_parallel_size=2, token_rounds=2).token_rounds == 1
    assert worded.plan(1, token_rounds="many").token_rounds == 1
    assert rounds.plan(4, token_rounds=2).token_rounds == 2

    @register("moded", layouts=("zigzag",))
    def moded(at: Pass, *, mode: Annotated[str, Option("its own", choices=("a", "b"))] = "a"):
        yield Step()

    @register("other", layouts=("zigzag",))
    def other(at: Pass, *, mode: Annotated[str, Option("too", choices=("b", "c"))] = "b"):
        yield Step()

    shared = strategy_options()
    assert shared["mode"].choices == ("a", "b", "c") and shared["mode"].help == "moded: its own; other: too"
    assert not shared["token_rounds"].choices and shared["grid"] == STRATEGY_OPTIONS["grid"]


def test_a_strategy_upon_another_is_its_author_s():
    @register("upon", layouts=("zigzag",), channels=STRATEGIES["mesh"].channels)
    @wraps(STRATEGIES["mesh"].write)
    def upon(at: Pass, **options):
        yield from STRATEGIES["mesh"].write(at, **options)

    assert upon.options == STRATEGIES["mesh"].options
    assert [*upon.plan(4, grid=(1, 4)).steps] == [*STRATEGIES["mesh"].plan(4, grid=(1, 4)).steps]
    assert STRATEGIES["mesh"].is_builtin and not upon.is_builtin, "its plans are verified and compared between ranks"


def endless(at: Pass):
    while True:
        yield Step()


@pytest.mark.parametrize(
    "write,message",
    [
        (lambda at: None, r"strategy own: its function returns None; yield each Step"),
        (lambda at: [None], r"rank 0, step 0: None is not a Step"),
        (lambda at: [((), ())], r"rank 0, step 0: \(\(\), \(\)\) is not a Step"),
        (lambda at: [Step((), Attend((0,), (0,)))], r"rank 0, step 0: Step\(.*\) is not a Step with a tuple of"),
        (lambda at: [Step((), (Attend(0, 0),))], r"rank 0, step 0: query chunks 0 of a block; need a tuple"),
        (lambda at: [Step((), (Attend((at.rank,), (at.rank - 1,)),))], r"rank 0, step 0: key/value chunks \(-1,\)"),
        (lambda at: [Step((), (Attend((at.rank,), (at.n,)),))], r"rank 0, step 0: key/value chunks \(2,\)"),
        (endless, r"rank 0: own yields more than 50 steps; end its loop$"),
    ],
)
def test_what_a_strategy_yields_is_checked_before_empty_blocks_are_left_out(write, message, monkeypatch):
    monkeypatch.setattr("megatron.context_parallel.strategies.registry.MOST_STEPS", 50)
    own = replace(STRATEGIES["ring"], name="own", write=write)
    with pytest.raises((PlanError, UsageError), match=message):
        verify(own.plan(2))


def test_a_period_that_does_not_divide_the_ranks_is_not_used():
    ring = STRATEGIES["ring"]
    assert [replace(ring, period=4).plan(n).period for n in (2, 4, 6, 8)] == [4, 4, None, 4]
    for declared in (0, 1.0, (2, 3), (3, 2), (2, 0)):
        with pytest.raises(UsageError, match=r"strategy ring: period .* on 4 ranks; give 1 or more, or None"):
            replace(ring, period=lambda at, declared=declared: declared).plan(4)
    assert replace(ring, period=lambda at: (2, 2)).plan(4).width == 2


# -- named by specs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec,name,common,options",
    [
        ("ring", "ring", {}, {}),
        ("mesh:grid=4x2,layout=cyclic", "mesh", {"layout": "cyclic"}, {"grid": (4, 2)}),
        ("loongtrain:head_parallel_size=4,inner_ring_size=2", "loongtrain",
         {"head_parallel_size": 4}, {"inner_ring_size": 2}),
        ("lightseq:balance=no,prefetch=true", "lightseq", {}, {"balance": False, "prefetch": True}),
        ("mesh:q_cost=2", "mesh", {}, {"q_transfer_blocks": 2.0}),
    ],
)  # fmt: skip
def test_specs_of_the_package(spec, name, common, options):
    choice = parse_spec(spec)
    assert (choice.strategy, choice.common, choice.options) == (STRATEGIES[name], common, options)
    assert parse_spec(choice.spec) == choice
    assert parse_spec(name, **common, **options) == choice == parse_spec(choice)


def test_specs_of_modules_and_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("in_module", "in_file"):
        (tmp_path / f"my_{name}.py").write_text(OWN.format(name=name))
    for source, name in (("my_in_module", "in_module"), (f"{tmp_path}/my_in_file.py", "in_file")):
        choice = parse_spec(f"{source}:{name}:hops=2")
        assert choice.strategy is STRATEGIES[name] and choice.options == {"hops": 2} and choice.layout == "cyclic"
        assert choice.spec == f"{source}:{name}:hops=2"
        assert parse_spec(choice.spec) == choice  # loaded once: a second time the name would be taken
        assert parse_spec(f"{source}:{name}").options == {}


@pytest.mark.parametrize(
    "spec,message",
    [
        ("circle", "--cp-strategy circle: unknown; choose one of allgather, attention2d, direct, ring"),
        ("", "--cp-strategy : give NAME, MODULE:NAME or FILE.py:NAME, then :OPTION=VALUE,..."),
        ("a:b:c:d=1", "--cp-strategy a:b:c:d=1: give NAME, MODULE:NAME or FILE.py:NAME"),
        ("mesh:grid", "--cp-strategy mesh:grid: grid has no value; give mesh:OPTION=VALUE,..."),
        ("mesh:tile=2x2", "--cp-strategy mesh: no option tile; it has grid, q_transfer_blocks"),
        ("usp:head-parallel-size=2", "no option head-parallel-size; give head_parallel_size"),
        ("ring:grid=2x2", "--cp-grid 2x2: not an option of ring; give --cp-strategy attention2d or mesh"),
        ("mesh:grid=2", "--cp-grid 2: need two whole numbers, such as 2x4"),
        ("mesh:grid=0x4", "--cp-grid 0x4: need two whole numbers, such as 2x4"),
        ("lightseq:balance=maybe", "--cp-balance maybe: give true or false"),
        (
            "loongtrain:inner_ring_size=0",
            "--cp-inner-ring-size 0: need a whole number, 1 or more, such as 4",
        ),
        (
            "usp:head_parallel_size=two",
            "--cp-head-parallel-size two: need a whole number, 1 or more, such as 2",
        ),
        ("ring:q_cost=2", "--cp-q-transfer-blocks 2: not an option of ring; give --cp-strategy mesh"),
        ("mesh:q_cost=2,q_transfer_blocks=2", "mesh: q_cost is the former name of q_transfer_blocks; leave one out"),
        ("mesh:q_transfer_blocks=much", "--cp-q-transfer-blocks much: need a number, above 0, such as 4"),
        ("auto", "--cp-strategy auto: give the result of resolve("),
        ("no_such_module:own", "no_such_module cannot be loaded (ModuleNotFoundError: No module named"),
        ("{folder}/absent.py:own", "absent.py cannot be loaded (FileNotFoundError:"),
        ("{folder}/broken.py:own", "broken.py cannot be loaded (ZeroDivisionError: division by zero)"),
        ("{folder}/empty.py:own", "empty.py:own: unknown; choose one of allgather,"),
        ("ring,ulysses", "--cp-strategy ring,ulysses: all layers have one strategy here; give one, such as ring"),
        ("mesh:grid=2x2+ring*4", "ring*4: all layers have one strategy here; give one, such as mesh:grid=2x2+ring"),
        ("mesh:grid=2x2*2,ring*2", "ring*2: all layers have one strategy here; give one, such as mesh:grid=2x2"),
        (
            "mesh:grid=2x2,ring",
            "mesh:grid=2x2,ring: all layers have one strategy here; give one, such as mesh:grid=2x2",
        ),
        ("ring,mesh:grid=2x2+ring", "+ring: all layers have one strategy here; give one, such as ring"),
        ("mesh:grid=2x2,q_cost", "--cp-q-transfer-blocks : need a number, above 0, such as 4"),
        ("attention2d:grid=2x2,fast", "--cp-strategy attention2d: no option fast; it has grid, overlap"),
        ("{folder}/a.py:own*2,{folder}/b.py:own", "b.py:own: all layers have one strategy here; give one, such as /"),
    ],
)
def test_specs_that_name_nothing_are_refused(spec, message, tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(UsageError) as refused:
        parse_spec(spec.format(folder=tmp_path))
    one_line(refused, message)


def test_both_passes_of_a_spec_have_one_layout():
    with pytest.raises(UsageError) as refused:
        parse_spec("ring+mesh:layout=cyclic").plan(4)
    one_line(
        refused, "the backward pass layout cyclic, head-parallel size 1, placement head-first, head rounds 1; give"
    )
    assert str(refused.value).endswith("; give both the same, such as --cp-layout zigzag")


def test_an_option_is_given_once():
    with pytest.raises(UsageError) as refused:
        parse_spec("mesh:grid=2x2", grid=(4, 1))
    one_line(refused, "--cp-strategy mesh:grid=2x2: grid is given twice; leave one out")
    assert parse_spec("mesh:grid=2x2", grid=None) == parse_spec("mesh:grid=2x2")


# -- planned --------------------------------------------------------------------------------------------------


def test_everyone_picks_the_same_grid(monkeypatch, capsys):
    """8 ranks, 8 heads, 2 key/value heads: 2 x 4 moves least, and with 8 key/value heads 4 x 2 would."""
    mesh, heads = STRATEGIES["mesh"], {"heads": 8, "kv_heads": 2}
    wanted = [*mesh.plan(8, grid=(2, 4), **heads).steps]
    assert wanted != [*mesh.plan(8, grid=(4, 2), **heads).steps]
    assert [*mesh.plan(8, **heads).steps] == wanted
    assert [*AllRanks(8, "mesh").plans.of(Mask(), (64, 64), 8, 2, backward=False).steps] == wanted
    sizes = ["--num-attention-heads", "8", "--num-query-groups", "2"]
    flags = "--num-layers 2 --hidden-size 64 --seq-length 64 --micro-batch-size 1 --group-query-attention --dry-run"
    flags += " --context-parallel-size 8 --cp-strategy mesh"
    monkeypatch.setenv("WORLD_SIZE", "8")
    moved = []
    for grid in ([], ["--cp-grid", "2x4"], ["--cp-grid", "4x2"]):
        args = parse_args([*flags.split(), *sizes, *grid])
        moved.append(attention_bytes(args, backward=False))
    assert moved[0] == moved[1] != moved[2]
    tables = []
    for text in ("mesh", "mesh:grid=2x4", "mesh:grid=4x2"):
        plan_tool([text, "--ranks", "8", *sizes])
        tables.append(capsys.readouterr().out.replace(text, "mesh").split())
    assert tables[0] == tables[1] != tables[2]


def test_a_rank_writes_only_its_own_steps():
    asked = []

    @register("asked", layouts=("cyclic",))
    def own(at: Pass):
        asked.append(at.rank)
        yield Step(attend=(Attend((at.rank,), (at.rank,)),))

    plan = own.plan(8)
    assert asked == [0], "the check of the options"
    assert plan.steps[-3] is plan.steps[5]
    assert asked == [0, 5]
    assert [attend.q_chunks for step in plan.steps[5] for attend in step.attend] == [(5,)]
    assert plan.steps[4:6] == (plan.steps[4], plan.steps[5]) and asked == [0, 5, 4]


@pytest.mark.parametrize("name", ["mesh", "attention2d"])
def test_a_strategy_need_not_ask_the_mask_what_to_send(name):
    """Data that a rank receives and does not use is no error; without the window all of it is used."""
    ranks, window = AllRanks(9, name, "zigzag"), Mask(True, (2, 0))
    for backward in (False, True):
        plan = ranks.plans.of(window, (72, 72), 4, 4, backward=backward)
        full = ranks.plans.of(Mask(), (72, 72), 4, 4, backward=backward)
        sent = [step.comm for step in plan.steps[3] if step.comm]
        all_sent = [step.comm for step in full.steps[3] if step.comm]
        assert sent == all_sent


# -- messages -------------------------------------------------------------------------------------------------


def test_both_ends_of_a_shift_agree():
    draw = random.Random(3)
    for _ in range(200):
        size, start, stride = draw.randrange(1, 8), draw.randrange(5), draw.randrange(1, 4)
        chunks, by = [draw.choice([None, *range(9)]) for _ in range(size)], draw.randrange(-9, 10)
        circles = [Ring(place, size, start, stride, "c") for place in range(size)]
        members = [circle.rank(circle.place) for circle in circles]
        assert members == [start + stride * place for place in range(size)]
        ops = {circle.rank(circle.place): circle.shift(T.KV, chunks.__getitem__, by) for circle in circles}
        sends = {(r, op.peer, op.chunk, op.channel) for r, mine in ops.items() for op in mine if isinstance(op, Send)}
        takes = {(op.peer, r, op.chunk, op.channel) for r, mine in ops.items() for op in mine if isinstance(op, Recv)}
        assert sends == takes
        to = {place: (place + by) % size for place in range(size)}
        moved = {(p, q) for p, q in to.items() if p != q and chunks[p] is not None}
        assert sends == {(members[p], members[q], chunks[p], "c") for p, q in moved}
