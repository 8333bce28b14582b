"""The host's time for the packed documents of a micro batch, before a rank's first block runs."""

import statistics
import time

import torch

from megatron.context_parallel import AllRanks
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.interface import Kernel
from megatron.context_parallel.plan.ir import Send
from megatron.context_parallel.plan.schedule import schedule
from megatron.context_parallel.runtime.rank_rows import rows_of_rank
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.mask import Mask

from .common import CheckReport, CheckSizes, synchronisations

CASES = ("ring", "ring:layout=contiguous", "ring:layout=cyclic", "lightseq", "ulysses", "attention2d", "mesh")


def end_tokens(length: int, documents: int, seed: int) -> torch.Tensor:
    """The ends of documents of random lengths: bool [1, length]."""
    draw = torch.Generator().manual_seed(seed)
    ends = torch.zeros(1, length, dtype=torch.bool)
    ends[0, torch.randperm(length - 1, generator=draw)[: documents - 1]] = True
    return ends


def plan_and_cut(
    cp: AllRanks, rank: int, mask: Mask, length: int, heads: int, kernel: Kernel, clock=time.process_time
) -> tuple[float, float]:
    """Seconds to create the plans of both passes, and all blocks and messages of a rank in them."""
    shape = (length, length), heads, heads
    start = clock()
    plans = [cp.plans.of(mask, *shape, backward=backward) for backward in (False, True)]
    for plan in plans:
        schedule(plan, rank)
    planned = clock()
    blocks = cp.plans.blocks(mask, shape[0], kernel)
    for plan in plans:
        rows = rows_of_rank(cp.plans.row_sets(plan, blocks), rank, blocks, torch.device("cpu"))
        for step in plan.steps[rank]:
            for op in step.comm:
                if isinstance(op, Send):
                    rows.where((op.tensor, op.chunk), op.peer)
            for attend in step.attend:
                for q in attend.q_chunks:
                    rows.blocks.pieces(q, attend.kv_chunks)
    return planned - start, clock() - planned


def measure_documents(report: CheckReport, sizes: CheckSizes, device: torch.device) -> None:
    """Milliseconds of a micro batch on the critical path, wall time, and how often the host waits for the GPU."""
    n, length = sizes.document_ranks, sizes.document_tokens
    kernel = kernel_for(device, torch.bfloat16, sizes.speed_head_dims[-1])
    for strategy in CASES:
        cps, times, waits = [AllRanks(n, strategy) for _ in range(AllRanks(n, strategy).plans.step_ranks)], [], 0
        for turn in range(sizes.repeats + 1):
            mask = Mask(documents=Documents.after(end_tokens(length, sizes.documents, turn)))
            with synchronisations(device) as counted:
                of_ranks = [
                    sum(plan_and_cut(cp, rank, mask, length, 4 * n, kernel, time.perf_counter))
                    for rank, cp in enumerate(cps)
                ]
            if turn:  # the first one initializes the layout
                times.append(1000 * max(of_ranks))
                waits += counted()
        report.add(
            "documents",
            **{"strategy": strategy, "tokens": length, "documents": sizes.documents, "ranks": n},
            **{"ms": statistics.median(times), "synchronisations": waits},
        )
