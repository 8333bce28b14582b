"""LightSeq: slots and idle slots, volume, overlap and memory by the paper's formulas, and exactness."""

import itertools
from collections import Counter

import pytest
import torch

from megatron.context_parallel import STRATEGIES, AllRanks, ContextParallel, UsageError, context_parallel_attention
from megatron.context_parallel.plan.ir import PARTIAL, Comm, Plan, Recv, T
from megatron.context_parallel.plan.trace import trace
from megatron.context_parallel.plan.verify import verify
from megatron.context_parallel.plan.volume import units
from megatron.context_parallel.runtime.executor import Executor
from megatron.context_parallel.tokens.layout import unshard
from tests.support.exact import HEADS, errors, exact, gradients, problem
from tests.support.sizes import SIZES

lightseq = STRATEGIES["lightseq"]
SOME = [*range(1, 14), 16, 17, 33, 64]
SWITCHES = [(balance, prefetch) for balance in (True, False) for prefetch in (True, False)]


def blocks(plan: Plan) -> list[list[tuple[int, int]]]:
    """Per rank, the (query chunk, key chunk) pairs it computes, in order."""
    computed = []
    for steps in plan.steps:
        own = []
        for step in steps:
            for block in step.attend:
                own += itertools.product(block.q_chunks, block.kv_chunks)
        computed.append(own)
    return computed


def helped(n: int) -> int:
    """Pairs of the balanced schedule that a helper computes: offsets n//2 + 1 .. n-1, of which there are n - offset."""
    m = (n - 1) // 2
    return m * (m + 1) // 2


def expected_volume(n: int, r: int, causal: bool, backward: bool, balance: bool) -> Counter:
    """Units rank r receives, by the formulas of docs/strategies/lightseq.md."""
    if not causal:
        fetched = answered = n - 1
        helps = late = 0
    elif balance:
        fetched, answered = min(r, n // 2), min(n - 1 - r, n // 2)
        helps, late = max(0, (n - 1) // 2 - r), max(0, r - n // 2)
    else:
        fetched, answered, helps, late = r, n - 1 - r, 0, 0
    if backward:
        return +Counter({T.KV: 2 * fetched, T.DKV: 2 * answered, T.QDO: 2 * helps, T.DQ: late})
    return +Counter({T.KV: 2 * fetched, T.Q: helps, T.O: late})


def counted(n: int, causal: bool, backward: bool, balance: bool) -> Counter:
    """Units that all ranks together receive, counted in the plan; each rank as expected."""
    total = Counter()
    for r, steps in enumerate(lightseq.plan(n, causal=causal, backward=backward, balance=balance).steps):
        mine = Counter()
        for op in (op for step in steps for op in step.comm if isinstance(op, Recv)):
            mine[op.tensor] += units(op.tensor)
        assert mine == expected_volume(n, r, causal, backward, balance), (n, r)
        total += mine
    return total


@pytest.mark.parametrize("balance,prefetch", SWITCHES)
def test_every_plan_is_proved_and_counted(balance, prefetch):
    for n in SOME if prefetch else SOME[:15]:  # every n up to 64 is counted below
        for causal in (True, False):
            for backward in (False, True):
                plan = lightseq.plan(n, causal=causal, backward=backward, balance=balance, prefetch=prefetch)
                volume = verify(plan).volume
                for r in range(n):
                    assert volume[r] == expected_volume(n, r, causal, backward, balance), (n, r, causal, backward)


def test_volume_is_the_papers():
    """Section 3.3, in units of N/n·d per rank: N·d is n units forward and 3N·d is 3n with backward.

    The paper counts n chunks where n-1 travel, and would send O to a helper where we send delta.
    """
    for n in SIZES:
        for balance in (True, False):
            h = helped(n) if balance else 0
            forward, backward = (counted(n, True, direction, balance) for direction in (False, True))
            assert forward.total() == n * (n - 1)  # the paper: n·n
            assert forward.total() + backward.total() == 3 * n * (n - 1) - h  # the paper: 3·n·n
            assert backward[T.QDO] == 2 * h  # had O travelled as well, it would be the paper's less the own chunks
        for direction, each in ((False, 2), (True, 4)):  # the paper, before halving: 2N·d, then KV and DKV
            assert counted(n, False, direction, True).total() == each * n * (n - 1)


def test_grouped_query_attention_shrinks_fetches_but_not_help():
    g, n = 0.25, 9
    w, h = n * (n - 1) / 2 - helped(n), helped(n)
    for backward, total in ((False, w * 2 * g + h * 2), (True, w * 4 * g + h * 3)):
        assert sum(v.total() for v in verify(lightseq.plan(n, backward=backward), kv_ratio=g).volume) == total


def test_idle_slots_are_the_papers():
    """Section 3.2. The paper divides idle slots by n² always, `Report.idle` by the slots the schedule has."""
    for n in [*range(1, 20), 33, 48, 64]:
        for backward in (False, True) if n < 20 else (n == 48,):
            for balance, slots in ((True, n // 2 + 1), (False, n)):
                plan = lightseq.plan(n, backward=backward, balance=balance)
                work = blocks(plan)
                assert len({pair for mine in work for pair in mine}) == sum(map(len, work)) == n * (n + 1) // 2
                assert max(map(len, work)) == slots
                idle = n * slots - n * (n + 1) // 2
                if balance:
                    assert idle == (0 if n % 2 else n // 2)
                    assert idle / n**2 == (0 if n % 2 else 1 / (2 * n))
                    assert idle / (n * slots) == pytest.approx(0 if n % 2 else 1 / (n + 2), abs=1e-15)
                else:
                    assert idle == (n**2 - n) // 2
                    assert idle / (n * slots) == (n**2 - n) / (2 * n**2)
                if n in (1, 2, 7, 8, 33, 64):  # no slot waits for another
                    assert trace(plan).finish == slots
                    assert verify(plan).idle == pytest.approx(idle / (n * slots), abs=1e-12)


def test_eight_workers_as_in_figure_1():
    """Workers are numbered from 1 there: worker 1 helps 8, 7 and 6 and idles only in slot 5."""
    work = blocks(lightseq.plan(8))
    assert work[0] == [(0, 0), (7, 0), (6, 0), (5, 0)]
    assert work[3] == [(3, 3), (3, 2), (3, 1), (3, 0)]
    assert work[6] == [(6, 6), (6, 5), (6, 4), (6, 3), (6, 2)]
    assert sum(5 - len(mine) for mine in work) == 4
    assert sum(8 - len(mine) for mine in blocks(lightseq.plan(8, balance=False))) == 28


def test_full_mask_is_plain_distattn():
    for balance in (True, False):
        work = blocks(lightseq.plan(6, causal=False, balance=balance))
        for r, own in enumerate(work):
            assert own == [(r, (r - t) % 6) for t in range(6)]


@pytest.mark.parametrize("causal", [True, False])
def test_every_chunk_comes_from_its_owner_and_nobody_is_first_in_line(causal):
    for n in (2, 7, 8):
        for backward in (False, True):
            plan = lightseq.plan(n, causal=causal, backward=backward)
            for r, steps in enumerate(plan.steps):
                for step in steps:
                    for channel in ("fetch", "results"):
                        ops = [op for op in step.comm if op.channel == channel]
                        kinds = sorted(type(op).__name__ for op in ops)
                        assert kinds in ([], ["Send"], ["Recv"], ["Recv", "Send"])
                        for op in ops:
                            owner = r if (type(op).__name__ == "Send") == (channel == "fetch") else op.peer
                            assert op.chunk == owner


def weight(op: Comm) -> float:
    """Bytes: partials travel in float32, the rest in 16 bits. One unit of 16 bits takes 0.1 of a block."""
    return 0.1 * units(op.tensor) * (2 if op.tensor in PARTIAL else 1)


@pytest.mark.parametrize("n", [2, 7, 8, 16])
@pytest.mark.parametrize("balance", [True, False])
def test_prefetch_hides_communication(n, balance):
    def finish(backward: bool, prefetch: bool) -> float:
        plan = lightseq.plan(n, backward=backward, balance=balance, prefetch=prefetch)
        return trace(plan, transfer_time=weight).finish

    slots = n // 2 + 1 if balance else n
    last_output = 0.2 if balance and n % 2 else 0  # of the helpers in the last slot; if n is even it has none
    assert finish(False, True) == pytest.approx(slots + last_output)
    # Backward the first fetch is in the open (0.2), not the last gradient (0.4 for float32 keys and values).
    assert finish(True, True) == pytest.approx(slots + 0.2)
    # Now every slot waits for its fetch, and the late ranks' for the outputs that come in the same batch.
    outputs = (n - 1) // 2 if balance else 0
    assert finish(False, False) == pytest.approx(slots + 0.2 * (slots - 1) + 0.2 * outputs)
    assert finish(True, False) > slots + 0.2 * (slots - 1) - 1e-9


@pytest.mark.parametrize("balance,causal,forward", [(True, True, 9), (False, True, 8), (True, False, 8)])
def test_memory_does_not_grow(balance, causal, forward):
    # Forward: own Q, KV, O; the KV at work and the next; one partial O on its way. Backward: own QDO, KV, DQ, DKV; the
    # KV at work and the next; the DKV at work, the one leaving and the one arriving.
    for n in (8, 9, 33):
        for backward, peak in ((False, forward), (True, 17)):
            plan = lightseq.plan(n, causal=causal, backward=backward, balance=balance)
            assert max(verify(plan).peak) == peak, (n, backward)


@pytest.mark.parametrize("causal", [True, False])
def test_received_partials_do_not_pile_up(causal, monkeypatch):
    """The owner merges them as they come, although it reads the sum only at the end."""
    waiting, run = Counter(), Executor._free

    def watch(self, step):
        waiting[self.plan.n] = max(waiting[self.plan.n], sum(len(v) for v in self.arriving.values()))
        run(self, step)

    monkeypatch.setattr(Executor, "_free", watch)
    for n in (9, 16):
        q = torch.randn(n * 2, 1, 1, 4, requires_grad=True)
        context_parallel_attention(q, q, q, AllRanks(n, "lightseq"), causal=causal).sum().backward()
    assert waiting == {9: 3, 16: 3}  # two batches of results and one fetch


@pytest.mark.parametrize("n", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("heads,kv_heads", HEADS)
def test_exact(n, causal, heads, kv_heads):
    expected = exact(n, heads, kv_heads, torch.float32, causal)
    for balance in (True, False):
        prefetch = balance == (kv_heads == 2)  # with 4, 2 and 1, so that each mask meets all four
        cp = AllRanks(n, "lightseq", balance=balance, prefetch=prefetch)

        def run(q, k, v, cp=cp):
            return context_parallel_attention(q, k, v, cp, causal=causal, return_lse=True)

        got = gradients(run, *problem(n, heads, kv_heads, torch.float32))
        assert max(errors(got, expected)) < 2e-6, (balance, prefetch)


def _on_rank(balance: bool, prefetch: bool) -> list[torch.Tensor]:
    cp = ContextParallel("lightseq", balance=balance, prefetch=prefetch)
    q, k, v, dout = (cp.shard(x) for x in problem(4, 8, 2, torch.float32))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = context_parallel_attention(*leaves, cp, return_lse=True)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("balance,prefetch", SWITCHES)
def test_exact_between_processes(ranks, balance, prefetch):
    per_rank = ranks(4, _on_rank, balance, prefetch)
    got = [unshard(list(parts), "contiguous") for parts in zip(*per_rank, strict=True)]
    assert max(errors(got, exact(4, 8, 2, torch.float32, True))) < 2e-6


@pytest.mark.parametrize(
    "asked,message",
    [
        ({"layout": "zigzag"}, "--cp-layout zigzag: not supported by lightseq; choose contiguous"),
        ({"balance": "maybe"}, "--cp-balance maybe: give true or false"),
        ({"prefetch": 2}, "--cp-prefetch 2: give true or false"),
        ({"helpers": 1}, "--cp-strategy lightseq: no option helpers; it has balance, prefetch"),
    ],
)
def test_wrong_options_are_refused(asked, message):
    with pytest.raises(UsageError) as refusal:
        lightseq.plan(4, **asked)
    assert str(refusal.value) == message
