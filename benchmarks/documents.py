"""Prints the host's time for the packed documents of one micro batch, before a rank's first block runs.

    PYTHONPATH=. python benchmarks/documents.py
    PYTHONPATH=. python benchmarks/documents.py --ranks 64 --documents 5000 --strategies placed:direct

"documents" and "placement" are the work of the data loader: end tokens to documents, and which rank gets which of
them. "plan" and "blocks" are on the critical path: the pairs and plans of both passes for the documents, and the rows
and blocks of a rank, cut for a GPU (full and causal pieces for a library, all else as runs). A case placed:SPEC has
the placement, another one the layout of its strategy. Each micro batch has other documents. Times are CPU times of one
thread, medians over the micro batches; those of the slowest rank.
"""

import argparse
import statistics
import time

import torch
from rich.table import Table

from megatron.context_parallel import AllRanks
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.commands.gpu_checks.documents import CASES, end_tokens, plan_and_cut
from megatron.context_parallel.kernels.choose import LibraryAndPosition
from megatron.context_parallel.kernels.masks import Piece, Runs
from megatron.context_parallel.tokens.mask import Documents, Mask
from megatron.context_parallel.tokens.place_documents import Costs, place


class Runner:
    """Takes full and causal pieces as a library does, whole blocks as the position kernel does. Nothing is computed."""

    name = "runner"

    def __init__(self) -> None:
        self.pinned = torch.empty(0, dtype=torch.int32)  # reused, as PyTorch reuses memory that a GPU reads

    def takes(self, piece: Piece, rows: int, keys: int) -> bool:
        return not isinstance(piece.mask, Runs)

    def pieces(self, block: Runs, keys: int) -> list[Piece]:
        rows = block.first.shape[1]
        if self.pinned.numel() < 2 * rows:
            self.pinned = torch.empty(2 * rows, dtype=torch.int32)
        torch.stack(block, out=self.pinned[: 2 * rows].view(2, 1, rows))
        return [Piece(slice(0, rows), slice(0, keys), Runs(*self.pinned[: 2 * rows].view(2, 1, rows)))]


KERNEL = LibraryAndPosition(Runner(), Runner())


def placed_in(documents: Documents, ranks: int) -> tuple[Documents, float]:
    """The placed documents, and the solver's seconds where links are so slow that it tries everything."""
    start = time.process_time()
    placement = place(documents, ranks, Costs(1e-10, row_inside=1e-6, row_between=1e-6))
    return documents.placed(placement), time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=2**20)
    parser.add_argument("--documents", type=int, default=200)
    parser.add_argument("--strategies", nargs="+", default=CASES, metavar="[placed:]SPEC")
    parser.add_argument("--micro-batches", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    length, heads = args.seq_length, 4 * args.ranks
    title = f"{length} tokens, {args.documents} documents, {args.ranks} ranks: ms of a micro batch"
    table = Table("case", "documents", "placement", "plan", "blocks", "critical path", title=title)
    for text in args.strategies:
        spec = text.removeprefix("placed:")
        steps_on = AllRanks(args.ranks, spec).plans.steps_on
        cps, times = [AllRanks(args.ranks, spec) for _ in range(steps_on)], []
        for turn in range(args.micro_batches + 1):
            ends = end_tokens(length, args.documents, turn)
            start = time.process_time()
            documents = Documents.after(ends)
            made = time.process_time() - start
            placed_documents, placed = placed_in(documents, steps_on)
            mask = Mask(documents=documents if text == spec else placed_documents)
            of_ranks = [plan_and_cut(cp, rank, mask, length, heads, KERNEL) for rank, cp in enumerate(cps)]
            if turn:  # the first meets the layout for the first time
                times.append((made, placed, *max(of_ranks, key=sum)))
        made, placed, planned, worst = (1000 * statistics.median(column) for column in zip(*times, strict=True))
        table.add_row(text, *(f"{x:.2f}" for x in (made, placed, planned, worst, planned + worst)))
    show(table)


if __name__ == "__main__":
    run_main(main)
