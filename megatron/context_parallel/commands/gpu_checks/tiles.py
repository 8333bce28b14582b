"""Times the position kernel with other tiles than those of its table, which were chosen without a GPU."""

import torch

from megatron.context_parallel.kernels.interface import BlockGrad, Kernel, Scores
from megatron.context_parallel.kernels.masks import CAUSAL
from megatron.context_parallel.kernels.position import PositionKernel
from megatron.context_parallel.kernels.position.tiles import Tiles

from .common import CheckReport, CheckSizes, RandomBlock, kernels, said
from .speed import GpuClock, medians

# Fewer rows in 4 warps let a multiprocessor run two programs. More stages fetch keys earlier.
OTHERS: dict[str, tuple[Tiles, ...]] = {
    "forward": (Tiles(128, 64, 8, 3), Tiles(64, 128, 4, 2), Tiles(64, 64, 4, 3), Tiles(128, 64, 4, 3)),
    "dq": (Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 2)),
    "dkv": (Tiles(64, 64, 4, 2), Tiles(64, 128, 8, 3), Tiles(32, 128, 4, 3), Tiles(128, 64, 4, 2)),
}


def time_tiles(report: CheckReport, sizes: CheckSizes, device: torch.device, clock: GpuClock) -> None:
    """Median milliseconds of a causal block in bfloat16; the backward pass is the deterministic one, with both kernels.

    The first row of each kernel has the tiles of the table.
    """
    length, (heads, group) = sizes.lengths[0], sizes.heads[0]
    for dim in reversed(sizes.speed_head_dims):
        for _, kernel in kernels(["triton"], device, torch.bfloat16, dim):
            if not isinstance(kernel, PositionKernel):  # a stand-in
                continue
            kernel = PositionKernel(device, deterministic=True)
            block = RandomBlock.random(length, length, heads, group, dim, torch.bfloat16, device)
            for name, others in OTHERS.items():
                table = kernel.tiles
                for tiles in (table[name][dim], *others):
                    kernel.tiles = {**table, name: {dim: tiles}}
                    taken, wrong = _milliseconds(kernel, name == "forward", block, sizes.repeats, clock)
                    row = {"kernel": name, "head_dim": dim, "length": length, **tiles._asdict()}
                    report.add("tiles", **row, ms=taken, wrong=wrong)
                kernel.tiles = table


def _milliseconds(
    kernel: Kernel, forward: bool, block: RandomBlock, repeats: int, clock: GpuClock
) -> tuple[float | None, str]:
    """The time of a pass, or why it does not run: tiles may need more shared memory than there is."""
    q, k, v, dout = block
    scores = Scores(q.shape[-1] ** -0.5)
    stats = torch.zeros(q.shape[:3], device=q.device)

    def call() -> None:
        if forward:
            kernel.forward(q, k, v, CAUSAL, scores)
        else:
            kernel.backward(BlockGrad(dout, q, k, v, stats, stats, CAUSAL), scores)

    try:
        return 1000 * medians({"call": call}, repeats, clock)["call"], ""
    except Exception as error:  # of Triton's compiler or of the launch
        return None, said(error)
