"""Compiles the position kernel ahead of time, without a GPU, through the same calls that launch it.

python -m tests.campaigns.compile_position_kernel   # fails if a kernel spills, or takes too much shared memory
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from megatron.context_parallel.kernels.delta_triton import output_with_fused
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, Runs
from megatron.context_parallel.kernels.position import kernel as position
from megatron.context_parallel.kernels.position.tiles import TILES

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes of a block, by architecture (CUDA guide, table 30)
SCALAR_COPIES = 8  # a few for each loop; more when each thread copies all numbers that it uses


class Compiled(NamedTuple):
    kernel: str
    spilled: int  # bytes of stack
    shared: int  # bytes
    wgmma: bool
    scalar_copies: int  # instructions that copy a single number of 4 bytes to shared memory


class Driver:
    """The part of a driver that compilation needs."""

    def __init__(self, architecture: int) -> None:
        self.target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_block(
    architecture: int,
    head_dim: int,
    dtype: torch.dtype,
    mask_name: str,
    value_dim: int | None = None,
    softcap: float = 0.0,
) -> list[Compiled]:
    """Every kernel a block of this head_dim and dtype launches, forward and backward of both forms.

    Also the one that gives delta to libraries.
    """
    value_dim = value_dim or head_dim
    compiled = []
    run = triton.runtime.jit.JITFunction.run

    def only_compile(self, *args, warmup, **kwargs):
        compiled.append(run(self, *args, warmup=True, **kwargs))

    triton.runtime.driver.set_active(Driver(architecture))
    position._architecture = lambda device: architecture
    triton.runtime.jit.JITFunction.run = only_compile
    try:
        q, dout = (torch.zeros(256, 4, 2, d, dtype=dtype) for d in (head_dim, value_dim))
        k, v = (torch.zeros(256, 4, d, dtype=dtype) for d in (head_dim, value_dim))
        lse, delta = (torch.zeros(256, 4, 2) for _ in range(2))
        ends = torch.arange(256, dtype=torch.int32)[None]
        mask = {"full": FULL, "causal": CAUSAL, "runs": Runs(ends // 2, ends)}[mask_name]
        scores = Scores(0.1, softcap)
        for deterministic in (False, True):
            kernel = position.PositionKernel(torch.device("meta"), deterministic=deterministic)
            if not deterministic:
                kernel.forward(q, k, v, mask, scores)
                for few in (3, 15):
                    some = Runs(*(x[:, :few] for x in mask)) if mask_name == "runs" else mask
                    keys = few if mask_name == "causal" else len(k)
                    kernel.forward(q[:few], k[:keys], v[:keys], some, scores)
                output_with_fused(delta, dout)
            kernel.backward(BlockGrad(dout, q, k, v, lse, delta, mask), scores)
    finally:
        triton.runtime.jit.JITFunction.run = run
    return [_inspect(x) for x in compiled]


def _inspect(compiled) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = [tool, "--dump-resource-usage", "--dump-sass", file.name]
        found = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    stack, local = (int(found.split(kind)[1].split()[0]) for kind in ("STACK:", "LOCAL:"))
    wgmma = "wgmma.mma_async" in compiled.asm["ptx"]
    copies = len(re.findall(r"LDGSTS\.E ", found))
    return Compiled(compiled.metadata.name, stack + local, compiled.metadata.shared, wgmma, copies)


if __name__ == "__main__":
    bad = 0
    cases = [(d, d, softcap) for d in position.PARTS for softcap in (0.0, 30.0)] + [(192, 128, 0.0)]
    for architecture in TILES:
        for head_dim, value_dim, softcap in cases:
            for dtype in (torch.float16, torch.bfloat16):
                for mask in ("full", "causal", "runs"):
                    for c in compile_block(architecture, head_dim, dtype, mask, value_dim, softcap):
                        good = not c.spilled and c.shared <= SHARED[architecture] and c.scalar_copies <= SCALAR_COPIES
                        bad += not good
                        case = architecture, head_dim, value_dim, softcap, dtype, mask
                        print("ok  " if good else "BAD ", *case, *c, flush=True)
    sys.exit(bad > 0)
