"""Sliding windows and packed documents: exact in every strategy and layout, and no chunk is sent that no query sees."""

import random
from itertools import product

import pytest
import torch

from megatron.context_parallel import LAYOUTS, STRATEGIES, AllRanks, ContextParallel, UsageError
from megatron.context_parallel.attention.api import context_parallel_attention
from megatron.context_parallel.kernels.reference import Reference
from megatron.context_parallel.kernels.to_device import to_device
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.runtime.blocks import Blocks
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.layout import Chunks, positions, unshard
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.placement import Placement
from megatron.context_parallel.tokens.slices import Slices
from tests.support.dense import dense_attention, visible
from tests.support.exact import WHAT, gradients

LENGTH, DIM = 192, 8


def documents(*samples: list[int]) -> Documents:
    """Of document lengths, a negative one for padding; what remains is one more. Those of one sample are for all."""
    rows = []
    for lengths in samples:
        ids = [-1 if count < 0 else i for i, count in enumerate(lengths) for _ in range(abs(count))]
        rows.append(ids + [1000] * (LENGTH - len(ids)))
    return Documents(torch.tensor(rows if len(rows) > 1 else rows[0]))


ODD = [5, 1, 40, -3, 59, 2, 1, 1, 33]
TINY = [97, *[1] * 45, -50]
MASKS = {
    "window": Mask(True, (20, 0)),
    "window of one": Mask(True, (0, 0)),
    "window over chunks": Mask(True, (100, 0)),
    "both sides": Mask(False, (30, 7)),
    "documents": Mask(documents=documents(ODD)),
    "documents, full": Mask(False, documents=documents(ODD, TINY)),
    "documents and window": Mask(True, (9, 0), documents(TINY, ODD)),
}
HP = {"usp": {"head_parallel_size": 2}}  # it needs two
CASES = [(name, layout, 4, HP.get(name, {})) for name, strategy in STRATEGIES.items() for layout in strategy.layouts]
CASES += [("attention2d", None, 6, {}), ("attention2d", None, 6, {"overlap": False}), ("mesh", None, 6, {})]
CASES += [("loongtrain", None, 8, {"head_parallel_size": 2}), ("lightseq", None, 3, {"balance": False})]
CASES += [("ring", "zigzag", 24, {}), ("ring", "contiguous", 1, {})]


def seen(mask: Mask, at: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Which of the positions `keys` each of the positions `at` sees, by definition: bool [samples, queries, keys]."""
    if mask.documents is None:
        return visible(at, keys, mask.causal, mask.window)
    starts, ends = mask.documents.around(torch.arange(mask.documents.shape[1]))
    return visible(at, keys, mask.causal, mask.window, torch.where(ends > starts, starts, -1))


def problem(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(LENGTH, 2, heads, DIM).to(dtype) for heads in (4, 2, 2, 4)]


def exact(mask: Mask, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    whole = torch.arange(LENGTH)
    pairs = seen(mask, whole, whole)
    return gradients(lambda *x: dense_attention(*x, pairs), *(x.double() for x in tensors))


def check(got: list[torch.Tensor], expected: list[torch.Tensor], bound: float, where: str) -> None:
    blind = expected[1].isneginf()
    assert torch.equal(got[1].isneginf(), blind), where
    assert not got[0][blind].any() and not got[2][blind].any(), f"{where}: rows that see nothing are not zero"
    for what, a, b in zip(WHAT, got, expected, strict=True):
        a, b = (x.double().masked_fill(x.isneginf(), 0.0) for x in (a, b))
        error = (a - b).norm() / max(b.norm(), b.numel() ** 0.5 / 10)  # some gradients are zero
        assert error <= bound, f"{where} {what}: {error:.1e}"


def on_all_ranks(mask: Mask, cp: AllRanks, tensors, kernel=None) -> list[torch.Tensor]:
    def run(q, k, v):
        how = {"causal": mask.causal, "window": mask.window, "documents": mask.documents}
        return context_parallel_attention(q, k, v, cp, return_lse=True, kernel=kernel, **how)

    return gradients(run, *tensors)


@pytest.mark.parametrize("i,mask", [*enumerate(MASKS.values())], ids=MASKS)
def test_every_strategy_and_layout(i, mask):
    tensors = problem()
    expected = exact(mask, tensors)
    for name, layout, n, options in CASES[i % 3 :: 3]:
        got = on_all_ranks(mask, AllRanks(n, name, layout, **options), tensors)
        check(got, expected, 3e-6, f"{name} {layout} {n} {options}")


@pytest.mark.parametrize("mask", ["both sides", "documents and window"])
def test_error_is_that_of_the_kernel(mask):
    mask, wide = MASKS[mask], problem(torch.float64)
    for name in STRATEGIES:
        ranks = AllRanks(4, name, **HP.get(name, {}))
        check(on_all_ranks(mask, ranks, wide, Reference()), exact(mask, wide), 1e-13, name)
    low = problem(torch.bfloat16)
    for name in ("ring", "attention2d", "lightseq"):
        check(on_all_ranks(mask, AllRanks(4, name), low), exact(mask, low), 4e-3, f"bfloat16 {name}")


@pytest.mark.parametrize("name", STRATEGIES)
def test_documents_do_not_touch_each_other(name):
    """Bit for bit: other documents, even of infinities, change nothing."""
    mask, tensors = MASKS["documents"], problem()
    inside = slice(49, 108)  # of the document of 59 tokens
    before = on_all_ranks(mask, AllRanks(4, name, **HP.get(name, {})), tensors)
    for x in tensors:
        x[:49] = x[:49].flip(0) * 3
        x[108:] += 1.0
    after = on_all_ranks(mask, AllRanks(4, name, **HP.get(name, {})), tensors)
    for what, a, b in zip(WHAT, before, after, strict=True):
        assert torch.equal(a[inside], b[inside]), what


def test_a_rank_of_padding_gives_zeros():
    ids = torch.zeros(LENGTH, dtype=torch.int)
    ids[90:] = -1  # with four contiguous chunks the last two see nothing at all
    tensors, mask = problem(), Mask(documents=Documents(ids))
    for name, layout in [
        ("ring", "contiguous"),
        ("lightseq", None),
        ("allgather", "contiguous"),
        ("attention2d", None),
    ]:
        got = on_all_ranks(mask, AllRanks(4, name, layout), tensors)
        assert all(not x[90:].any() for x in (got[0], *got[2:])) and got[1][90:].isneginf().all()
        check(got, exact(mask, tensors), 3e-6, name)


@pytest.mark.parametrize("name", STRATEGIES)
def test_scores_of_ten_thousand(name):
    """Softmax is all but one-hot; float32 scores of 1e4 are good to 1e-3, so results are too."""
    tensors, mask = problem(), MASKS["documents and window"]
    scores = torch.einsum("ibhd,jbhd->bhij", tensors[0][:, :, ::2], tensors[1]) * DIM**-0.5
    tensors = [tensors[0] * 1e4 / scores.abs().max(), *tensors[1:]]
    check(on_all_ranks(mask, AllRanks(4, name, **HP.get(name, {})), tensors), exact(mask, tensors), 2e-3, name)


# -- what the mask leaves of a plan -------------------------------------------------------------------------


def test_questions_to_pairs():
    """Chunk 0 sees 0 and 2, chunk 1 nothing, chunk 2 sees 0 and 1."""
    pairs, causal = Pairs((0b101, 0, 0b011)), Pairs((0b001, 0b011, 0b111))
    assert [(q, kv) for q in range(3) for kv in range(3) if pairs(q, kv)] == [(0, 0), (0, 2), (2, 0), (2, 1)]
    assert pairs.n == 3 and pairs.columns == (0b101, 0b100, 0b001)
    assert [pairs.full, causal.full, Pairs((0b111, 0b111, 0b110)).full, Pairs.all(3).full] == [False] * 3 + [True]
    assert [pairs.causal, causal.causal, Pairs((0, 0b01, 0)).causal] == [False, True, True]
    assert pairs.any((0, 1), (1, 2)) and not pairs.any((0, 1), (1,)) and not pairs.any((1,), (0, 1, 2))
    assert pairs.any((1, 2), (2, 1)) and not pairs.any((), (0,)) and not pairs.any((0,), ())
    assert [pairs.seen_from(first, 0) for first in range(3)] == [0b101, 0b110, 0b011]
    assert pairs.seen_from(2, 2) == 0b010
    assert pairs.stops == (3, 2, 2) and causal.stops == (3, 2, 1) and Pairs((0, 0)).stops == (1, 1)
    assert Pairs((0b10, 0b11)).stops == (2, 2) and Pairs.all(5).stops == (5,) * 5


def test_which_positions_are_seen():
    at = torch.tensor([0, 3, 7])
    far = torch.iinfo(torch.int32).max
    for mask, first, end in [
        (Mask(), [0, 0, 0], [1, 4, 8]),
        (Mask(False), [0, 0, 0], [far] * 3),
        (Mask(True, (2, -1)), [-2, 1, 5], [1, 4, 8]),
        (Mask(True, (0, 5)), [0, 3, 7], [1, 4, 8]),
        (Mask(False, (-1, 0)), [0, 0, 0], [1, 4, 8]),
        (Mask(False, (1, 2)), [-1, 2, 6], [3, 6, 10]),
        (Mask(False, documents=Documents(torch.tensor([0, 0, 0, 1, 1, 1, 1, -1]))), [0, 3, 7], [3, 7, 7]),
        (Mask(True, (2, 0), Documents(torch.tensor([0, 0, 0, 1, 1, 1, 1, 1]))), [0, 3, 5], [1, 4, 8]),
    ]:
        assert [x.tolist() for x in mask.seen(at)] == [[first], [end]], mask
    assert [Mask().plain, Mask(False).plain, Mask(True, (-1, 0)).plain] == [True, True, False]
    assert not Mask(documents=Documents(torch.zeros(2, dtype=torch.int))).plain
    assert Mask(False).pairs(*Chunks.pair("zigzag", 3, 12)) == Pairs.all(3)
    assert Mask(False, (0, 0)).pairs(*Chunks.pair("contiguous", 3, 12)) == Pairs((0b001, 0b010, 0b100))
    assert Mask(True, (1, 0)).pairs(*Chunks.pair("cyclic", 4, 4)) == Pairs((0b0001, 0b0011, 0b0110, 0b1100))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_are_those_of_the_positions(layout):
    for n in (1, 3, 4):
        chunks = [positions(layout, c, n, LENGTH) for c in range(n)]
        for mask in [*MASKS.values(), Mask(), Mask(False), Mask(True, (1, 0)), Mask(False, (0, 64))]:
            pairs = mask.pairs(*Chunks.pair(layout, n, LENGTH))
            for q in range(n):
                for kv in range(n):
                    some = bool(seen(mask, chunks[q], chunks[kv]).any())
                    assert pairs(q, kv) >= some
                    exactly = layout != "cyclic" and mask.documents is None
                    assert not exactly or pairs(q, kv) == some, (mask.window, n, q, kv)


@pytest.mark.parametrize("name", STRATEGIES)
def test_plans_of_any_pairs_are_proved(name):
    draw, strategy = random.Random(1), STRATEGIES[name]
    hp = {"optional": 1, "required": 2, "all": 5}[strategy.head_parallel]
    for n in (2, 3, 4, 6, 9) if hp < 5 else (1,):
        for kind in range(6):
            if kind < 3:  # windows of contiguous chunks
                rows = [(2 << q) - (1 << max(0, q - kind)) for q in range(n)]  # the bits max(0, q - kind) .. q
            else:
                rows = [draw.randrange(1 << n) | 1 << q for q in range(n)]
            for backward in (False, True):
                verify(
                    strategy.plan(n * hp, visible_pairs=Pairs(tuple(rows)), backward=backward, head_parallel_size=hp)
                )


def test_a_window_spares_communication():
    """With contiguous chunks as long as the window a rank sees its own and the previous chunk: one hop, not n - 1."""
    window = Mask(True, (8, 0)).pairs(*Chunks.pair("contiguous", 8, 64))
    for name, forward, backward in [("ring", 2, 4), ("lightseq", 2, 4), ("loongtrain", 2, 4)]:
        plans = [STRATEGIES[name].plan(8, layout="contiguous", visible_pairs=window, backward=b) for b in (False, True)]
        options = {"inner_ring_size": 8} if name == "loongtrain" else {}
        if options:
            plans = [
                STRATEGIES[name].plan(8, layout="contiguous", visible_pairs=window, backward=b, **options)
                for b in (False, True)
            ]
        assert [verify(plan).received for plan in plans] == [forward, backward], name
    documents = Mask(documents=Documents(torch.arange(64) // 8))
    assert (
        verify(
            STRATEGIES["ring"].plan(
                8, layout="contiguous", visible_pairs=documents.pairs(*Chunks.pair("contiguous", 8, 64))
            )
        ).received
        == 0
    )


# -- documents, however they are given ----------------------------------------------------------------------


def test_documents_from_end_tokens_and_from_cu_seqlens():
    ends = torch.tensor([[0, 0, 1, 0, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0, 1]]).bool()
    marked = around(Documents.after(ends))
    assert marked == [
        [[0, 0, 0, 3, 3, 5, 6, 6], [0, 1, 1, 1, 1, 1, 1, 1]],
        [[3, 3, 3, 5, 5, 6, 8, 8], [1, 8, 8, 8, 8, 8, 8, 8]],
    ]
    packed = Documents.packed(torch.tensor([0, 3, 5, 6, 8, 9, 16], dtype=torch.int32), 8, samples=2)
    numbered = Documents(torch.tensor([[4, 4, 4, 0, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]))
    assert around(packed) == around(numbered) == marked
    # Two tokens of padding behind the first document, one behind the last, and an empty document between.
    padded = Documents.packed(torch.tensor([0, 2, 2, 5]), 8, torch.tensor([0, 4, 4, 8]))
    assert around(padded) == [[[0, 0, 2, 3, 4, 4, 4, 7]], [[2, 2, 2, 3, 7, 7, 7, 7]]]
    short = Documents.packed(torch.tensor([0, 5, 8, 10]), 8, samples=2)  # tokens after the last belong to none
    assert around(short)[1] == [[5, 5, 5, 5, 5, 8, 8, 8], [2, 2, 2, 3, 4, 5, 6, 7]]
    assert around(Documents(torch.tensor([0, 0, -1, -2, 0]))) == [[[0, 0, 2, 3, 4]], [[2, 2, 2, 3, 5]]]
    assert [x.shape for x in (packed, padded, Documents(torch.zeros(5).int()))] == [(2, 8), (1, 8), (1, 5)]
    assert [x.lengths for x in (packed, padded, short)] == [[3, 2, 1, 2, 1, 7], [2, 3], [5, 3, 2]]


def around(documents: Documents) -> list[list[list[int]]]:
    return [x.tolist() for x in documents.around(torch.arange(documents.shape[1]))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_runs_are_those_of_the_positions(layout):
    """By sorting and searching all positions."""
    chunks = Chunks.pair(layout, 3, LENGTH)[0]
    for mask in MASKS.values():
        blocks = Blocks(mask, chunks, chunks, Reference())
        for q in range(3):
            at = chunks.positions(q)
            for gathered in [(0,), (2, 0), (0, 1, 2)]:
                keys = torch.cat([chunks.positions(c) for c in gathered]).sort().values
                expected = torch.stack([torch.searchsorted(keys, bound.contiguous()) for bound in mask.seen(at)])
                got = torch.stack(blocks.key_ranges(q, gathered))
                assert blocks.key_rows(gathered) == len(keys) and got.dtype == torch.int32
                assert torch.equal(got.long(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_spans_are_those_of_the_positions(layout):
    """And the rows of a chunk that they meet, which may be none."""
    chunks = Slices.of(Chunks.pair(layout, 3, LENGTH)[0])
    at = torch.arange(LENGTH)
    single = Mask(documents=documents([1] * 189 + [2]))
    wide = [mask for mask in MASKS.values() if mask.window != (0, 0)]  # a window less than a stride: more keys
    for mask in (single, *wide):
        pairs = seen(mask, at, at).any(0)
        for chunk, other in product(range(3), repeat=2):
            own, others = chunks.positions(chunk), chunks.positions(other)
            keys, queries = pairs[own].any(0), pairs[:, own].any(1)
            for met, spans in ((keys, mask.spans(chunks, chunk)), (queries, mask.spans_of_keys(chunks, chunk))):
                low, high = (torch.from_numpy(bound)[:, None] for bound in spans)
                assert torch.equal(((low <= at) & (at < high)).any(0), met)
                some = chunks.narrowed({other: chunks.range_of(other, *spans)})
                assert torch.equal(some.positions(other), others[met[others]])


def test_documents_of_each_batch_share_what_they_do_not_decide():
    """The positions of gathered keys, and the mask without documents, are computed once."""
    cp, kernel = AllRanks(4, "attention2d"), Reference()
    first, second = (
        cp.plans.blocks(Mask(documents=documents(lengths)), (LENGTH,) * 2, kernel) for lengths in (ODD, TINY)
    )
    assert first is not second and first.undivided is second.undivided
    assert first.undivided.key_ranges(1, (0, 1)) is second.undivided.key_ranges(1, (0, 1))
    cpu = torch.device("cpu")
    assert first.gather_order((0, 1), cpu) is second.gather_order((0, 1), cpu)


def test_indices_of_gathered_rows_are_copied_to_the_device_once():
    placement = Placement([[(0, 3), (5, 6)], [(3, 5), (6, 8)]])
    blocks = Blocks(Mask(), placement, placement, Reference())
    meta = torch.device("meta")
    order = blocks.gather_order((0, 1), meta)
    assert [where.device for *_, where in order] == [meta] * 2
    assert blocks.gather_order((0, 1), meta) is order
    on_cpu = blocks.gather_order((0, 1), torch.device("cpu"))
    assert [where.tolist() for *_, where in on_cpu] == [[0, 1, 2, 5], [3, 4, 6, 7]]


def test_copies_to_a_gpu_start_from_pinned_memory(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: calls.append("pin") or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, non_blocking: calls.append((device.type, non_blocking)))
    to_device(torch.ones(2), torch.device("cuda"))
    to_device(torch.ones(2), torch.device("cpu"))
    assert calls == ["pin", ("cuda", True), ("cpu", True)]


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Documents.packed(torch.tensor([1, 4]), 8), r"cu_seqlens \[1, 4\]: must ascend from 0"),
        (lambda: Documents.packed(torch.tensor([0, 5, 3]), 8), "must ascend"),
        (lambda: Documents.packed(torch.tensor([0, 5, 12]), 8), "crosses the end of its sample of 8 tokens"),
        (
            lambda: Documents.packed(torch.tensor([0, 5, 8, 9]), 8),
            "ends at 9, beyond 1 x 8 tokens; give samples=2",
        ),
        (
            lambda: Documents.packed(torch.tensor([0, 5, 8]), 8, samples=2),  # of the first sample alone
            "ends at 8, before the last of 2 samples of 8 tokens begins; count through all samples, to 16",
        ),
        (lambda: Documents.packed(torch.tensor([[0, 5]]), 8), r"cu_seqlens \[1, 2\] of torch.int64: need int"),
        (lambda: Documents(torch.tensor([0.0, 1.0])), r"documents \[2\] of torch.float32: need integers"),
        (lambda: Documents(torch.zeros(1, 2, 3, dtype=torch.long)), r"documents \[1, 2, 3\]"),
        (lambda: Mask(True, (-2, 0)), r"--window-size \(-2, 0\): .* such as 4096,0"),
        (lambda: Mask(True, (4,)), r"--window-size \(4,\)"),
    ],
)
def test_what_cannot_be_a_mask(make, message):
    with pytest.raises(UsageError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def test_documents_of_another_sequence_are_refused():
    q = torch.randn(8, 3, 2, 4)
    for ids in (torch.zeros(9).long(), torch.zeros(3, 9).long(), torch.zeros(2, 8).long()):
        with pytest.raises(UsageError, match=r"documents of \[\d, \d\] .* need \[3, 8\]"):
            context_parallel_attention(q, q, q, AllRanks(2), documents=Documents(ids))


def test_documents_of_one_sample_are_not_those_of_others():
    """Only numbers without a sample, [length], are for all samples of a batch."""
    q, ids, bounds = torch.randn(8, 2, 2, 4), torch.tensor([0, 0, 0, 0, 0, 1, 1, 1]), torch.tensor([0, 5, 8])
    of_one = [Documents(ids[None]), Documents.packed(bounds, 8), Documents.after((ids.diff(append=ids[:1]) != 0)[None])]
    for documents in of_one:
        alone = context_parallel_attention(q[:, :1], q[:, :1], q[:, :1], AllRanks(2), documents=documents)
        with pytest.raises(UsageError, match=r"of \[1, 8\] .* need \[2, 8\].* or Documents\(ids\) of int \[length\]"):
            context_parallel_attention(q, q, q, AllRanks(2), documents=documents)
        shared = context_parallel_attention(q, q, q, AllRanks(2), documents=Documents(ids))
        torch.testing.assert_close(shared[:, :1], alone)


# -- between processes --------------------------------------------------------------------------------------


def _on_rank(name: str, layout: str | None, options: dict, ids: torch.Tensor, window: tuple[int, int]) -> list:
    cp = ContextParallel(name, layout, **options)
    results = []
    for how in ({"documents": Documents(ids)}, {"window": window}, {"documents": Documents(ids), "window": window}):
        q, k, v, dout = (cp.shard(x) for x in problem())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out, lse = context_parallel_attention(*leaves, cp, return_lse=True, **how)
        results.append([out.detach(), lse, *torch.autograd.grad(out, leaves, dout)])
    return [cp.layout, cp.chunk, results]


def test_between_processes(ranks):
    ids = torch.stack([torch.arange(LENGTH) // 37, torch.arange(LENGTH) // 50 - 1])
    window = (41, 0)
    masks = [Mask(documents=Documents(ids)), Mask(True, window), Mask(True, window, Documents(ids))]
    cases = [("ring", "contiguous", {}), ("ring", "zigzag", {}), ("lightseq", None, {}), ("attention2d", None, {})]
    cases += [("mesh", "zigzag", {}), ("loongtrain", "contiguous", {"head_parallel_size": 2, "inner_ring_size": 2})]
    for name, layout, options in cases:
        by_chunk = sorted(ranks(4, _on_rank, name, layout, options, ids, window), key=lambda result: result[1])
        for i, mask in enumerate(masks):
            of_ranks = [reply[2][i][:5] for reply in by_chunk]
            got = [unshard(parts, by_chunk[0][0]) for parts in zip(*of_ranks, strict=True)]
            check(got, exact(mask, problem()), 3e-6, f"{name} {layout}")
