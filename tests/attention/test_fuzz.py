"""The fuzzer finds no fault in the package, and finds faults that are injected."""

import math
import os
import signal
from collections.abc import Iterator
from dataclasses import fields
from random import Random

import pytest
import torch

from megatron.context_parallel import STRATEGIES
from megatron.context_parallel.kernels.merge import merge
from megatron.context_parallel.runtime import executor
from megatron.context_parallel.tokens.mask import Mask
from tests.campaigns.fuzz import __main__ as fuzz
from tests.campaigns.fuzz import case as fuzz_case
from tests.campaigns.fuzz import oracle as fuzz_oracle
from tests.campaigns.fuzz import ranks as fuzz_ranks
from tests.campaigns.fuzz.case import IN_PROCESS, ON_RANKS, Call, Case, draw, from_json, to_json

SEED = 16


@pytest.fixture(scope="module")
def pool():
    pool = fuzz_ranks.Pool(2)
    yield pool
    pool.stop()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(fuzz_case, "LONGEST", 64)
    monkeypatch.setattr(fuzz_case, "LONG", 100)
    monkeypatch.setattr(fuzz_case, "MOST_RANKS", 12)


def failures(fuzzing: fuzz.Fuzz, cases: int) -> Iterator[str]:
    for i in range(cases):
        case = fuzzing.draw(SEED, i)
        if wrong := fuzzing.check(case):
            yield f"{wrong}: {to_json(case)}"


def test_the_package_passes(pool):
    fuzzing = fuzz.Fuzz(2)
    fuzzing.pool = pool
    assert list(failures(fuzzing, 6)) == []
    assert fuzzing.came["passed"] > 3


def test_a_part_of_the_heads_has_the_documents_of_their_samples(pool):
    """`direct` computes a part of the heads first. A kernel of capped scores takes all samples at once."""
    documents = [[[0, 8], [1, 16]], [[0, 13], [1, 11]], [[0, 24]]]
    calls = [Call(1, 24, 2 * kv, kv, 8, 3, "float64", documents=documents, softcap=5.0) for kv in (1, 4)]
    fuzzing = fuzz.Fuzz(2)
    fuzzing.pool = pool
    assert [fuzzing.check(Case(IN_PROCESS, "direct", "cyclic", 3, {}, [call])) for call in calls] == [None, None]
    assert fuzzing.came["passed"] == 2


def test_a_case_survives_its_line():
    for i in range(200):
        case = draw(Random(i), IN_PROCESS, 12)
        assert from_json(to_json(case)) == case


def test_every_strategy_layout_and_option_is_drawn():
    drawn = [draw(Random(i), IN_PROCESS, 12) for i in range(2000)]
    for name, strategy in STRATEGIES.items():
        of_strategy = [case for case in drawn if case.strategy == name]
        assert {case.layout for case in of_strategy} == set(strategy.layouts)
        drawn_options = {option for case in of_strategy for option in case.options}
        assert drawn_options >= {*strategy.options, "placement", "partials_in_16_bits"}
        placements = {type(call.placement) for case in of_strategy for call in case.calls}
        assert placements == {type(None), int, list}
    calls = [call for case in drawn for call in case.calls]
    for field in fields(Call)[5:]:
        assert any(getattr(call, field.name) != field.default for call in calls), field.name
    short = [call for call in calls if call.kv_length and call.kv_length < call.length and not call.causal]
    assert any(call.window[0] >= 0 > call.window[1] for call in short)
    assert any("+" in case.strategy and case.strategy.count("partials_in_16_bits") == 1 for case in drawn)


def test_the_oracle_by_hand():
    """Two documents, padding and a window of one token: the visible keys and one output row, computed by hand."""
    call = Call(1, 6, 1, 1, 2, window=(1, -1), documents=[[[0, 3], [-1, 1], [0, 2]]], dtype="float64", scale=0.5)
    rows = ["100000", "110000", "011000", "000000", "000010", "000011"]
    assert fuzz_oracle.seen(call).int().tolist() == [[list(map(int, row)) for row in rows]]
    q, k, v = (x[:, 0, 0] for x in fuzz_oracle.inputs(call)[:3])
    a, b = (math.exp(0.5 * sum(q[2] * k[j])) for j in (1, 2))
    out, lse = (answer.value[:, 0, 0] for answer in fuzz_oracle.answers(call)[:2])
    assert out[2].tolist() == pytest.approx(((a * v[1] + b * v[2]) / (a + b)).tolist())
    assert lse[2].item() == pytest.approx(math.log(a + b))
    assert lse[3] == -math.inf and not out[3].any()


def _sees_one_more(self: Mask, positions: torch.Tensor, seen=Mask.seen) -> tuple[torch.Tensor, torch.Tensor]:
    first, end = seen(self, positions)
    return first, end + 1


def _forgets_weights(out, lse, other_out, other_lse) -> None:
    out.add_(other_out).mul_(0.5)
    torch.logaddexp(lse, other_lse, out=lse)


def _rounds_to_float32(out, lse, other_out, other_lse) -> None:
    merge(out, lse, other_out, other_lse)
    out.copy_(out.float())


@pytest.mark.parametrize(
    "where,name,broken,cases",
    [
        (Mask, "seen", _sees_one_more, 5),
        (executor, "merge", _forgets_weights, 8),
        (executor, "merge", _rounds_to_float32, 20),
    ],
)
def test_what_is_broken_is_found(monkeypatch, where, name, broken, cases):
    monkeypatch.setattr(where, name, broken)
    assert any(failures(fuzz.Fuzz(0), cases))


def test_a_refusal_is_counted_and_no_failure(pool):
    case = Case(ON_RANKS, "ring", "zigzag", 2, {"head_parallel_size": 2}, [Call(0, 8, 3, 3, 4)])
    fuzzing = fuzz.Fuzz(2)
    fuzzing.pool = pool
    assert fuzzing.check(case) is None and fuzzing.came["refused"] == 1
    assert fuzzing.report() == 0


def test_a_hang_is_a_failure_and_the_next_case_runs(pool, monkeypatch):
    monkeypatch.setattr(fuzz_ranks, "PATIENCE", 2.0)
    case = Case(ON_RANKS, "ring", "zigzag", 2, {}, [Call(0, 8, 1, 1, 4)])
    fuzzing = fuzz.Fuzz(2)
    fuzzing.pool = pool
    pool.start()
    os.kill(pool.processes[1].pid, signal.SIGSTOP)
    assert fuzzing.check(case) == "rank 0 nothing in 2 s; rank 1 nothing in 2 s"
    monkeypatch.undo()
    assert fuzzing.check(case) is None and fuzzing.came["passed"] == 1
