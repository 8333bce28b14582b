"""Chunks of any rows: each rank has any number of queries and of keys, also none."""

from unittest import mock

import pytest
import torch

from megatron.context_parallel import STRATEGIES, AllRanks, ContextParallel, UsageError
from megatron.context_parallel.attention.api import attention_of_rows
from megatron.context_parallel.plan.volume import Shape, received_bytes
from megatron.context_parallel.runtime.comm import transport
from megatron.context_parallel.tokens.documents import Documents, Sequences
from megatron.context_parallel.tokens.mask import Mask
from tests.support.rows_case import VARIANTS, Batch, error
from tests.support.wire import count_received

EXACT = 2e-6
UNEVEN = [(5, 0), (1, 37), (1, 1), (23, 60), (2, 3)]  # new and cached tokens


@pytest.mark.parametrize("name", [name for name, s in STRATEGIES.items() if s.head_parallel == "optional"])
def test_every_strategy(name):
    """2 to 4 ranks, of which some have no queries or no keys; grouped heads and a window."""
    for n, tokens, window in ((2, UNEVEN, -1), (4, UNEVEN, 7), (4, [(1, 0), (2, 1)], -1), (3, [(1, 90)], -1)):
        assert error(Batch.draw(n, tokens, seed=n, window=window), AllRanks(n, name)) < EXACT, (n, tokens)


def test_one_rank_has_all_or_nothing():
    for spec in VARIANTS.values():
        batch = Batch([40, 3], [7, 3], torch.full((43,), 2), n=4)
        assert error(batch, AllRanks(4, spec(4))) < EXACT


def _between_processes() -> list[float]:
    specs = [*(spec(3) for spec in VARIANTS.values()), "allgather"]
    groups = [ContextParallel(spec) for spec in specs]
    batches = [Batch.draw(3, UNEVEN, seed=1), Batch.draw(3, [(1, 50), (1, 0)], seed=2)]
    batches.append(Batch([30], [6], torch.full((30,), 1), n=3))
    with mock.patch.object(transport, "post", wraps=transport.post) as posted:
        errors = [error(batch, cp) for cp in groups for batch in batches]
    messages = []
    for call in posted.call_args_list:
        messages += [x for of in call.args[1:] for _, x in of]
    assert messages and all(x.numel() for x in messages), "no rows, no message"
    return errors


def test_between_processes(ranks):
    assert max(max(errors) for errors in ranks(3, _between_processes)) < EXACT


def test_bytes_on_the_wire(monkeypatch):
    """What is sent is what the volume says, and the formulas of docs/inference.md."""
    sent = count_received(monkeypatch)
    n, heads, kv_heads, d = 4, 4, 2, 8
    batch = Batch.draw(n, UNEVEN, seed=3)
    blocks = batch.blocks()
    q, kv = blocks.q.rows, blocks.kv.rows
    partial = heads * (d + 1) * 4
    formulas = {
        "pass-kv": lambda r: (sum(kv) - kv[r]) * 2 * kv_heads * d * 4,
        "pass-q": lambda r: (sum(q) - q[r]) * heads * d * 4 + (sum(q) - q[(r + 1) % n]) * partial,
        "pass-q-all-to-all": lambda r: (sum(q) - q[r]) * heads * d * 4 + (n - 1) * q[r] * partial,
        "decode": lambda r: (sum(q) - q[r]) * heads * d * 4 + (n - 1) * q[r] * partial,
    }
    for variant, formula in formulas.items():
        cp = AllRanks(n, VARIANTS[variant](n))
        sent.clear()
        assert error(batch, cp, heads, kv_heads) < EXACT
        counted_by_plan = [
            received_bytes(cp.plans.full(heads, kv_heads), r, Shape(0, heads, kv_heads, d, 4), (q, kv))
            for r in range(n)
        ]
        assert [sent[r] for r in range(n)] == counted_by_plan == [formula(r) for r in range(n)], variant


def test_a_sequence_is_computed_alone():
    """Not a bit of a row depends on other sequences, even if they are NaN."""
    n, cp = 3, AllRanks(3, "ring")
    batch = Batch.draw(n, [(9, 30), (40, 0), (1, 70)], seed=4)
    q, k, v = batch.tensors(4, 2)
    blocks, first = batch.blocks(), slice(0, 39)
    alone = Batch([39], [9], batch.rank_of[first], n)
    own = alone.blocks()
    expected = attention_of_rows([alone.inputs(r, own, q[first], k[first], v[first]) for r in range(n)], cp, own)
    for x in (q, k, v):
        x[39:] = float("nan")
    outs = attention_of_rows([batch.inputs(r, blocks, q, k, v) for r in range(n)], cp, blocks)
    for out, one in zip(outs, expected, strict=True):
        assert torch.equal(out[: len(one)], one)


def test_one_rank_alone():
    """Several tokens of a sequence and single ones, a window, sinks, and no rows at all."""
    for tokens, window in ((UNEVEN, -1), (UNEVEN, 7), ([(1, 30), (1, 0), (1, 9)], -1), ([(70, 90), (40, 0)], 33)):
        assert error(Batch.draw(1, tokens, seed=1, window=window), AllRanks(1)) < EXACT, (tokens, window)
    batch, sinks = Batch.draw(2, UNEVEN, seed=2), torch.tensor([0.3, -1.0, 0.0, 2.0])
    q, k, v = batch.tensors(4, 2)
    blocks = batch.blocks()
    several = attention_of_rows([batch.inputs(r, blocks, q, k, v) for r in range(2)], AllRanks(2), blocks, sinks=sinks)
    whole = Batch(batch.lengths, batch.new, torch.zeros_like(batch.rank_of), 1)
    own = whole.blocks()
    (alone,) = attention_of_rows([whole.inputs(0, own, q, k, v)], AllRanks(1), own, sinks=sinks)
    places = torch.searchsorted(own.q.positions(0), torch.cat([blocks.q.positions(r) for r in range(2)]))
    assert (alone[places] - torch.cat(several)).abs().max() < EXACT
    none = Batch([9], [0], torch.zeros(9, dtype=torch.int64), 1)
    q, k, v = none.tensors(4, 2)
    (nothing,) = attention_of_rows([none.inputs(0, none.blocks(), q, k, v)], AllRanks(1), none.blocks())
    assert nothing.shape == (0, 1, 4, 8)


def test_sequences_and_documents_are_the_same_mask():
    lengths = [3, 1, 5]
    ids = torch.repeat_interleave(torch.tensor(lengths))
    at = torch.arange(9)
    for window in ((-1, -1), (2, 1)):
        for causal in (True, False):
            ours, theirs = (Mask(causal, window, x).seen(at) for x in (Sequences(lengths), Documents(ids)))
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert Sequences(lengths).shape == Documents(ids).shape == (1, 9)


def test_what_does_not_fit_is_refused():
    batch = Batch.draw(2, UNEVEN, seed=5)
    blocks, (q, k, v) = batch.blocks(), batch.tensors(4, 2)
    inputs = [batch.inputs(r, blocks, q, k, v) for r in range(2)]
    with pytest.raises(UsageError, match=r"rank 0: \(\d+, \d+\) rows of queries and keys, but its chunks have \("):
        attention_of_rows(inputs[::-1], AllRanks(2), blocks)
    with pytest.raises(UsageError, match="--cp-head-parallel-size 2: head parallelism needs chunks of equal size"):
        attention_of_rows(inputs, AllRanks(2, "ulysses"), blocks)
