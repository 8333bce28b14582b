"""A batch's own placement: exact for every strategy, and checked."""

import pickle
import random
from unittest import mock

import numpy as np
import pytest
import torch

from megatron.context_parallel import AllRanks, ContextParallel, context_parallel_attention
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.reference import Reference
from megatron.context_parallel.plan.volume import Shape, received_bytes
from megatron.context_parallel.runtime.blocks import Blocks
from megatron.context_parallel.strategies import STRATEGIES
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.placement import Placement
from tests.support.dense import dense_attention, visible
from tests.support.wire import count_received


def random_placement(draw: random.Random, n: int, length: int) -> Placement:
    """Slices at random edges, dealt to chunks of equal size in a random order."""
    cuts = sorted(draw.sample(range(1, length), draw.randrange(1, min(length, 4 * n))))
    slices = list(zip([0, *cuts], [*cuts, length], strict=True))
    draw.shuffle(slices)
    chunks: list[list[tuple[int, int]]] = [[]]
    room = length // n
    for start, end in slices:
        while start < end:
            if not room:
                chunks.append([])
                room = length // n
            taken = min(room, end - start)
            chunks[-1].append((start, start + taken))
            start += taken
            room -= taken
    return Placement([sorted(chunk) for chunk in chunks])


def random_documents(draw: random.Random, length: int) -> torch.Tensor:
    ids = torch.tensor(np.cumsum([draw.random() < 0.15 for _ in range(length)]))
    if draw.random() < 0.3:
        ids[draw.randrange(1, length) :] = -1  # padding
    return ids


@pytest.mark.parametrize("head_parallel_size", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_is_exact(name, head_parallel_size):
    """Random placements, documents and windows on 4 ranks against dense attention, all gradients."""
    draw = random.Random(name)
    if STRATEGIES[name].head_parallel == "all":
        cp = AllRanks(4, name)
    elif head_parallel_size == 1 and STRATEGIES[name].head_parallel == "required":
        pytest.skip("needs head parallelism")
    else:
        cp = AllRanks(4, name, head_parallel_size=head_parallel_size)
    for window in ((-1, -1), (5, 0), (3, 2)):
        length = 4 * draw.choice([4, 8, 15])
        ids = random_documents(draw, length)
        placement = random_placement(draw, 4 // cp.head_parallel_size, length)
        documents = Documents(ids.unsqueeze(0)).placed(placement)
        causal = window[1] != 2
        shapes = (4, 8), (2, 8), (2, 6)
        inputs = [torch.randn(length, 1, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        dout = torch.randn(length, 1, 4, 6, dtype=torch.float64)
        ours = context_parallel_attention(
            *inputs, cp, causal=causal, window=window, documents=documents, return_lse=True
        )
        positions = torch.arange(length)
        dense = dense_attention(*inputs, visible(positions, positions, causal, window, ids))
        torch.testing.assert_close(ours, dense, rtol=0, atol=1e-11)
        grads = torch.autograd.grad(ours[0], inputs, dout)
        expected = torch.autograd.grad(dense[0], inputs, dout)
        torch.testing.assert_close(grads, expected, rtol=0, atol=1e-11)


def test_pairs_are_those_of_the_positions():
    draw = random.Random(1)
    for _ in range(40):
        n = draw.choice([1, 2, 3, 8])
        length = n * draw.choice([2, 5, 16])
        ids = random_documents(draw, length)
        placement = random_placement(draw, n, length) if n > 1 else Placement([[(0, length)]])
        window = draw.choice([(-1, -1), (3, 0), (2, 2)])
        mask = Mask(draw.random() < 0.7, window, Documents(ids.unsqueeze(0)).placed(placement))
        pairs = mask.pairs(placement, placement)
        positions = [placement.positions(chunk) for chunk in range(n)]
        for q in range(n):
            for kv in range(n):
                seen = visible(positions[q], positions[kv], mask.causal, window, ids).any()
                assert pairs(q, kv) == seen, (q, kv)


@pytest.mark.parametrize("name", ["ring", "lightseq", "mesh", "attention2d", "allgather", "loongtrain"])
def test_only_rows_that_are_needed_are_sent(name, monkeypatch):
    """The bytes on the wire are those of the row sets, and for the direct strategy the keys that the ranks see."""
    sent = count_received(monkeypatch)
    n, length, heads, kv_heads, d = 4, 96, 4, 2, 8
    draw = random.Random(3)
    ids = random_documents(draw, length)
    placed = Documents(ids.unsqueeze(0)).placed(random_placement(draw, n, length))
    for documents, window in ((placed, (-1, -1)), (None, (7, 0))):
        cp = AllRanks(n, name)
        inputs = [torch.randn(length, 1, h, d, requires_grad=True) for h in (heads, kv_heads, kv_heads)]
        mask = Mask(True, window, documents)
        blocks = cp.plans.blocks(mask, (length, length), kernel_for(inputs[0].device, torch.float32, d))
        sent.clear()
        out = context_parallel_attention(*inputs, cp, window=window, documents=documents)
        for backward in (False, True):
            if backward:
                sent.clear()
                out.sum().backward()
            plan = cp.plans.of(mask, (length, length), heads, kv_heads, backward=backward)
            sets = cp.plans.row_sets(plan, blocks)
            shape = Shape(length // n, heads, kv_heads, d, 4)
            expected = [received_bytes(plan, rank, shape, sets) for rank in range(n)]
            assert [sent[rank] for rank in range(n)] == expected
            if name == "lightseq" and documents:
                positions = [placed.placement.positions(chunk) for chunk in range(n)]
                keys = []
                for rank, own in enumerate(positions):
                    others = torch.cat([of for chunk, of in enumerate(positions) if chunk != rank])
                    keys.append(int(visible(own, others, True, window, ids)[0].any(0).sum()))
                if not backward:
                    assert expected == [2 * 4 * kv_heads * d * count for count in keys]
            assert sum(expected) < sum(received_bytes(plan, rank, shape) for rank in range(n)) or name == "allgather"


def test_each_kernel_cuts_its_own_blocks():
    """Layers of one mask and one plan that different kernels compute share row sets, but no pieces."""
    cp, counts = AllRanks(2), []
    x = torch.randn(16, 1, 2, 4, dtype=torch.float64)
    for _ in range(2):
        kernel = Reference()
        with mock.patch.object(kernel, "pieces", wraps=kernel.pieces) as pieces:
            context_parallel_attention(x, x, x, cp, window=(3, 0), kernel=kernel)
            counts.append(pieces.call_count)
    assert counts[0] == counts[1] > 0


def test_both_passes_and_all_layers_share_what_is_cut():
    """Also the pieces for a part of the heads, which `direct` computes first in the backward pass."""
    cp, kernel = AllRanks(4, "direct"), Reference()
    documents = Documents(torch.arange(32).view(1, 32) // 5).placed(random_placement(random.Random(2), 4, 32))
    x = torch.randn(32, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    cuts = []
    with (
        mock.patch.object(kernel, "pieces", wraps=kernel.pieces) as pieces,
        mock.patch.object(Blocks, "_split_by_heads", autospec=True, side_effect=Blocks._split_by_heads) as of_heads,
        mock.patch.object(Mask, "_spans", autospec=True, side_effect=Mask._spans) as spans,
    ):
        for _ in range(2):
            out = context_parallel_attention(x, x, x, cp, documents=documents, kernel=kernel)
            cut = pieces.call_count
            out.sum().backward()
            assert pieces.call_count == cut
            cuts.append((cut, of_heads.call_count))
    assert cuts[0] == cuts[1]
    assert spans.call_count == 1  # for the pairs of all chunks, and the rows of all ranks


def test_samples_are_laid_end_to_end():
    ids = torch.tensor([[0, 0, 0, 1], [0, 0, -1, -1]])
    placement = Placement([[(0, 1), (5, 8)], [(1, 5)]])
    documents = Documents(ids).placed(placement)
    assert documents.shape == (1, 8)
    starts, ends = documents.around(torch.arange(8))
    assert starts.tolist() == [[0, 0, 0, 3, 4, 4, 6, 7]] and ends.tolist() == [[3, 3, 3, 4, 6, 6, 6, 7]]
    batch = torch.arange(8).view(1, 8)
    assert placement.shard(batch, 0, 2, dim=1).tolist() == [[0, 5, 6, 7]]
    assert placement.shard(batch, 3, 4, dim=1).tolist() == [[3, 4]]  # the second half of chunk 1
    assert placement.positions(1) is placement.positions(1)  # computed once for all tensors of a batch
    copied = pickle.loads(pickle.dumps(documents))
    assert copied.placement.digest() == placement.digest() != Placement([[(0, 4)], [(4, 8)]]).digest()


@pytest.mark.parametrize(
    ("slices", "words"),
    [
        ([[(0, 3)], [(3, 4)]], "chunks of [3, 1] tokens"),
        ([[(2, 4), (0, 2)], [(4, 8)]], "slices of chunk 0 do not ascend"),
        ([[(0, 4)], [(3, 7)]], "3 to 3 are in two chunks"),
        ([[(0, 4)], [(5, 9)]], "4 to 4 are in no chunk"),
        ([[(1, 4)], [(4, 7)]], "0 to 0 are in no chunk"),
        ([[], []], "chunks of [0, 0] tokens"),
    ],
)
def test_what_is_no_placement(slices, words):
    with pytest.raises(UsageError) as error:
        Placement(slices)
    assert words in str(error.value)


def test_a_placement_for_another_group_or_batch_is_refused():
    placement = Placement([[(0, 4)], [(4, 8)]])
    with pytest.raises(UsageError, match="placement of 8 tokens: the documents have 1 x 6"):
        Documents(torch.zeros(6, dtype=torch.int64)).placed(placement)
    documents = Documents(torch.zeros(8, dtype=torch.int64)).placed(placement)
    x = torch.randn(8, 1, 2, 4)
    with pytest.raises(UsageError, match="placed on 2 chunks: the context group has 4"):
        context_parallel_attention(x, x, x, AllRanks(4), documents=documents)
    with pytest.raises(UsageError, match=r"placement of 8 tokens: a tensor \[2, 8\] has 2 in dimension 0; lay"):
        placement.shard(torch.zeros(2, 8), 0, 2)
    with pytest.raises(UsageError, match=r"a tensor \[1, 16\] has 16 in dimension 1"):
        placement.shard(torch.zeros(1, 16), 0, 2, dim=1)


SLICES = [[(0, 3), (20, 23)], [(3, 9)], [(9, 12), (17, 20)], [(12, 17), (23, 24)]]


def _on_rank(strategy: str, options: dict, swapped: bool) -> torch.Tensor:
    """The output of a rank for its tokens of a batch. `swapped`: rank 1 exchanges two chunks of the placement."""
    cp = ContextParallel(strategy, **options)
    slices = [SLICES[0] + SLICES[1], SLICES[2] + SLICES[3]] if options else SLICES
    if swapped and cp.rank == 1:
        slices = [slices[1], slices[0], *slices[2:]]
    ids = torch.arange(24).div(7, rounding_mode="floor")
    documents = Documents(ids).placed(Placement([sorted(chunk) for chunk in slices]))
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 24, 1, 4, 8)
    local = [cp.shard(x, documents=documents) for x in (q, k, v)]
    out = context_parallel_attention(*local, cp, documents=documents)
    at = cp.positions(24, documents)
    dense, _ = dense_attention(q, k, v, visible(torch.arange(24), torch.arange(24), documents=ids))
    return (out - dense[at]).abs().max()


@pytest.mark.parametrize(
    ("strategy", "options"), [("lightseq", {}), ("mesh", {}), ("usp", {"head_parallel_size": 2}), ("allgather", {})]
)
def test_between_processes(ranks, strategy, options):
    assert max(ranks(4, _on_rank, strategy, options, False)) < 1e-6


def _is_refused() -> str:
    with pytest.raises(UsageError) as error:
        _on_rank("lightseq", {}, True)
    return str(error.value)


def test_ranks_with_other_placements_stop(ranks):
    for words in ranks(4, _is_refused):
        assert words.startswith("documents: ranks 0 and 1 of the context group have other placements")
