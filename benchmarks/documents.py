"""Prints the host's time for the packed documents of one micro batch, before a rank's first block runs.

    PYTHONPATH=. python benchmarks/documents.py
    PYTHONPATH=. python benchmarks/documents.py --ranks 64 --documents 5000 --strategies placed:direct

"documents" and "placement" are the work of the data loader: end tokens to documents, and which rank gets which of
them. "plan" and "blocks" are on the critical path: the pairs and plans of both passes for the documents, and the rows
and blocks of a rank, cut for a GPU (full and causal pieces for a library, all else as runs). A case placed:SPEC has
the placement, another one the layout of its strategy. Each micro batch has other documents. Times are CPU times of one
thread, medians over the micro batches; those of the slowest rank. "of a step" is the share that all four have, if
nothing hides them, of a training step of one micro batch of a model, as it is predicted for `direct` with the placement
and full recomputation.
"""

import argparse
import gc
import statistics
import time

import torch
from rich.table import Table

from megatron.context_parallel import AllRanks
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.step.documents_time import DocumentsAttention
from megatron.context_parallel.cluster.step.step_time import forecast_step
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.commands.gpu_checks.documents import CASES, end_tokens, plan_and_cut
from megatron.context_parallel.kernels.choose import LibraryAndPosition
from megatron.context_parallel.kernels.masks import KeyRanges, Piece
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.place_documents import Costs, place
from megatron.context_parallel.tokens.placement import Placement
from megatron.context_parallel.trainer.arguments.preset_model import preset_model


class Runner:
    """Takes full and causal pieces as a library does, whole blocks as the position kernel does. Nothing is computed."""

    name = "runner"

    def __init__(self) -> None:
        self.pinned = torch.empty(0, dtype=torch.int32)  # reused, as PyTorch reuses memory that a GPU reads

    def takes(self, piece: Piece, rows: int, keys: int) -> bool:
        return not isinstance(piece.mask, KeyRanges)

    def pieces(self, block: KeyRanges, keys: int) -> list[Piece]:
        rows = block.first.shape[1]
        if self.pinned.numel() < 2 * rows:
            self.pinned = torch.empty(2 * rows, dtype=torch.int32)
        torch.stack(block, out=self.pinned[: 2 * rows].view(2, 1, rows))
        return [Piece(slice(0, rows), slice(0, keys), KeyRanges(*self.pinned[: 2 * rows].view(2, 1, rows)))]


KERNEL = LibraryAndPosition(Runner(), Runner())


def placed_in(documents: Documents, ranks: int) -> tuple[Placement, float]:
    """The placement, and the solver's seconds where links are so slow that it tries everything."""
    start = time.process_time()
    placement = place(documents, ranks, Costs(1e-10, row_inside=1e-6, row_between=1e-6))
    return placement, time.process_time() - start


def step_seconds(args: argparse.Namespace) -> float:
    """The predicted training step of one micro batch, with the documents of the first one."""
    documents = Documents.after(end_tokens(args.seq_length, args.documents, 0))
    run = TrainConfig(
        seq_length=args.seq_length,
        context_parallel_size=args.ranks,
        cp_strategy="direct",
        data_parallel_sharding_strategy="optim_grads_params",
        use_torch_fsdp2=True,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        recompute_whitelist=("core_attention",),
    )
    model = preset_model(args.model, args.seq_length)
    attention = DocumentsAttention(documents, placed=True)
    return forecast_step(model, run, load_cluster(args.cluster).part(args.ranks), attention).seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=2**20)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--strategies", nargs="+", default=CASES, metavar="[placed:]SPEC")
    parser.add_argument("--micro-batches", type=int, default=5)
    parser.add_argument("--model", default="llama3-8b", help="preset of the trainer; default: %(default)s")
    parser.add_argument("--cluster", default="dgx-h100", help="description or preset; default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    length, heads = args.seq_length, 4 * args.ranks
    gc.disable()  # a collection would go through the plans of all ranks, which are in one process here
    step = 1000 * step_seconds(args)
    title = f"{length} tokens, {args.documents} documents, {args.ranks} ranks: ms of a micro batch\n"
    title += f"a step of {args.model} on {args.cluster}: {step:.0f} ms, predicted"
    table = Table("case", "documents", "placement", "plan", "blocks", "critical path", "of a step", title=title)
    for text in args.strategies:
        spec = text.removeprefix("placed:")
        step_ranks = AllRanks(args.ranks, spec).plans.step_ranks
        cps, times = [AllRanks(args.ranks, spec) for _ in range(step_ranks)], []
        for turn in range(args.micro_batches + 1):
            ends = end_tokens(length, args.documents, turn)
            start = time.process_time()
            documents = Documents.after(ends)
            made = time.process_time() - start
            placement, placed = placed_in(documents, step_ranks)
            of_ranks = []
            for rank, cp in enumerate(cps):  # each has its own documents, as in a process of its own
                mask = Mask(documents=documents if text == spec else documents.placed(placement))
                of_ranks.append(plan_and_cut(cp, rank, mask, length, heads, KERNEL))
            if turn:  # the first meets the layout for the first time
                times.append((made, placed, *max(of_ranks, key=sum)))
        made, placed, planned, worst = (1000 * statistics.median(column) for column in zip(*times, strict=True))
        share = (made + placed + planned + worst) / step
        cells = (made, placed, planned, worst, planned + worst)
        table.add_row(text, *(f"{x:.2f}" for x in cells), f"{share:.1%}")
    show(table)


if __name__ == "__main__":
    run_main(main)
