"""Compiles our Triton kernels ahead of time, without a GPU, through the calls that launch them.

python -m tests.campaigns.compile_kernels             # fails if a kernel spills, or takes too much memory
python -m pytest tests/campaigns/compile_kernels.py   # a block and a decode step for one architecture
"""

import itertools
import multiprocessing
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from megatron.context_parallel.kernels.delta_triton import output_with_fused
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, KeyRanges
from megatron.context_parallel.kernels.merge_triton import merge_fused
from megatron.context_parallel.kernels.paged import PagedKernel, Seen
from megatron.context_parallel.kernels.paged.kernel import FP8
from megatron.context_parallel.kernels.position import kernel as position
from megatron.context_parallel.kernels.position.tiles import TILES
from megatron.context_parallel.kernels.quantized import FORMATS, pack

SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}  # bytes of a block, by architecture (CUDA guide, table 30)
SCALAR_COPIES = 8  # a few for each loop; more when each thread copies all numbers that it uses


# No matrix products, or of fewer rows than wgmma takes.
WITHOUT_WGMMA = (
    *("by_head_kernel", "output_kernel", "few_rows_kernel", "merge_parts_kernel", "paged_kernel"),
    "merge_kernel",
)
IN_PLACE = ("merge_kernel",)  # they write what several of their warps read


class Compiled(NamedTuple):
    kernel: str
    spilled: int  # bytes of stack
    shared: int  # bytes
    wgmma: bool
    scalar_copies: int  # instructions that copy a single number of 4 bytes to shared memory
    serialized: bool  # each wgmma waits for the one before: ptxas does this, silently, where it lacks registers
    overwritten: int  # registers written while a wgmma reads them, which ptxas older than 13.3 may do
    writes_early: bool  # to memory, before its warps have met
    unfenced: int  # products that may read shared memory before all threads have copied to it

    @property
    def races(self) -> bool:
        """Whether a warp may write a number that another one has not read yet."""
        return self.writes_early and self.kernel in IN_PLACE

    @property
    def faulty(self) -> bool:
        """Whether its products are slow or may be wrong."""
        return self.serialized or self.races or self.overwritten + self.unfenced > 0


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
    position._architecture = lambda device: architecture
    with _compiling(architecture) as compiled:
        q, dout = (torch.zeros(256, 4, 2, d, dtype=dtype) for d in (head_dim, value_dim))
        k, v = (torch.zeros(256, 4, d, dtype=dtype) for d in (head_dim, value_dim))
        lse, delta = (torch.zeros(256, 4, 2) for _ in range(2))
        ends = torch.arange(256, dtype=torch.int32)[None]
        mask = {"full": FULL, "causal": CAUSAL, "key_ranges": KeyRanges(ends // 2, ends)}[mask_name]
        scores = Scores(0.1, softcap)
        for deterministic in (False, True):
            kernel = position.PositionKernel(torch.device("meta"), deterministic=deterministic)
            if not deterministic:
                kernel.forward(q, k, v, mask, scores)
                for few in (3, 15):
                    some = KeyRanges(*(x[:, :few] for x in mask)) if mask_name == "key_ranges" else mask
                    keys = few if mask_name == "causal" else len(k)
                    kernel.forward(q[:few], k[:keys], v[:keys], some, scores)
                output_with_fused(delta, dout)
            kernel.backward(BlockGrad(dout, q, k, v, lse, delta, mask), scores)
    return [_inspect(x) for x in compiled]


def compile_pages(architecture: int, head_dim: int, value_dim: int, dtype: torch.dtype, form: str | None, group: int):
    """The kernels of a decode step over a cache in pages."""
    q = torch.zeros(4, 2 * group, head_dim, dtype=dtype)
    k, v = (torch.zeros(129, 2, d, dtype=dtype) for d in (head_dim, value_dim))
    if form:
        k, v = pack(k, form), pack(v, form)
    numbers = torch.zeros(4, dtype=torch.int32)
    sent = torch.zeros(4, 2 * group, value_dim + 1)
    with _compiling(architecture) as compiled:
        kernel = PagedKernel(4, 2 * group, 2, value_dim, likely=1, device=torch.device("meta"), processors=132)
        seen = Seen(numbers[None].expand(4, -1).contiguous(), numbers, numbers, 64)
        kernel.forward(q, k, v, seen, 0.1, sent[..., :-1], sent[..., -1], form)
    return [_inspect(x) for x in compiled]


def compile_merge(architecture: int, head_dim: int, dtype: torch.dtype, statistics: torch.dtype) -> list[Compiled]:
    """The kernel that merges a partial output in a dtype into one in float32 with a log-sum-exp in another."""
    out, other = (torch.zeros(256, 4, 2, head_dim, dtype=kind) for kind in (torch.float32, dtype))
    lse, other_lse = torch.zeros(256, 4, 2, dtype=statistics), torch.zeros(256, 4, 2)
    with _compiling(architecture) as compiled:
        merge_fused(out, lse, other, other_lse)
    return [_inspect(x) for x in compiled]


@contextmanager
def _compiling(architecture: int) -> Iterator[list]:
    """Launches only compile meanwhile. Yields what they compiled."""
    compiled = []
    run = triton.runtime.jit.JITFunction.run

    def only_compile(self, *args, warmup, **kwargs):
        compiled.append(run(self, *args, warmup=True, **kwargs))

    triton.runtime.driver.set_active(Driver(architecture))
    triton.runtime.jit.JITFunction.run = only_compile
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # such as that a launch takes a default that the next release changes
            yield compiled
    finally:
        triton.runtime.jit.JITFunction.run = run


def _inspect(compiled) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        dump = [tool, "--dump-resource-usage", "--dump-sass", file.name]
        found = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    stack, local = (int(found.split(kind)[1].split()[0]) for kind in ("STACK:", "LOCAL:"))
    ptx = compiled.asm["ptx"]
    wgmma, writes_early = "wgmma.mma_async" in ptx, "st.global" in ptx.partition("bar.sync")[0]
    copies = len(re.findall(r"LDGSTS\.E ", found))
    products, waits = (len(re.findall(name, found)) for name in ("HGMMA", r"WARPGROUP\.DEPBAR"))
    serialized = 0 < products <= waits
    faults = serialized, overwritten(found), writes_early, unfenced(ptx)
    return Compiled(compiled.metadata.name, stack + local, compiled.metadata.shared, wgmma, copies, *faults)


def unfenced(ptx: str) -> int:
    """How many products of tensor cores follow a copy to shared memory without a fence."""
    copied, count = False, 0
    for name in re.findall(r"cp\.async\.wait_group|fence\.proxy\.async|wgmma\.mma_async|tcgen05\.mma\b", ptx):
        if name in ("cp.async.wait_group", "fence.proxy.async"):
            copied = name == "cp.async.wait_group"
        else:
            count += copied
    return count


def overwritten(sass: str) -> int:
    """How many instructions write to registers that a running wgmma reads: before it is waited for."""
    running: list[list[set[int]]] = [[]]  # by committed group, the last one still open; the registers of each product
    count = 0
    for name, arguments in re.findall(r"\*/\s+(?:@!?\w+ )?([A-Z]\S*) (.*?);", sass):
        target = re.match(r"R(\d+)", arguments)
        if name.startswith("HGMMA"):
            source = re.match(r"R\d+, R(\d+)", arguments)
            running[-1] += [{int(source[1]) + i for i in range(4)}] if source else []
            running += [[]] if "gsb0" in arguments else []
        elif name == "WARPGROUP.DEPBAR.LE":
            running = running[-1 - int(arguments.split(",")[1], 16) :]
        elif target and not name.startswith(("ST", "RED", "ATOM")):
            width = 4 if ".128" in name or name.startswith("LDSM") else 2 if ".64" in name or ".WIDE" in name else 1
            written = {int(target[1]) + i for i in range(width)}
            count += any(written & read for group in running for read in group)
    return count


def _judge(architecture: int, *case: object, found: list[Compiled]) -> int:
    """Prints the kernels of a case. Returns how many are bad."""
    bad = 0
    for c in found:
        fits = not c.spilled and c.shared <= SHARED[architecture]
        good = fits and c.scalar_copies <= SCALAR_COPIES and not c.faulty
        bad += not good
        print("ok  " if good else "BAD ", architecture, *case, *c, flush=True)
    return bad


def blocks() -> int:
    """How many kernels of blocks are bad."""
    bad = 0
    cases = [(d, d, softcap) for d in position.PARTS for softcap in (0.0, 30.0)] + [(192, 128, 0.0)]
    for architecture in TILES:
        if why := position.refusal(torch.bfloat16, (64, 64), divmod(architecture, 10)):
            print("left out", architecture, why, flush=True)
            continue
        for head_dim, value_dim, softcap in cases:
            for dtype, mask in itertools.product((torch.float16, torch.bfloat16), ("full", "causal", "key_ranges")):
                found = compile_block(architecture, head_dim, dtype, mask, value_dim, softcap)
                bad += _judge(architecture, head_dim, value_dim, softcap, dtype, mask, found=found)
    return bad


def pages() -> int:
    """How many kernels of decode steps are bad."""
    bad = 0
    sizes = [(d, d) for d in position.PARTS] + [(192, 128)]
    for architecture, form, group in itertools.product(TILES, (None, *FORMATS), (1, 8, 48)):
        if form == "fp8" and architecture < FP8:
            continue
        for (head_dim, value_dim), dtype in itertools.product(sizes, (torch.float16, torch.bfloat16)):
            found = compile_pages(architecture, head_dim, value_dim, dtype, form, group)
            bad += _judge(architecture, head_dim, value_dim, dtype, form, group, found=found)
    return bad


def merges() -> int:
    """How many kernels of merges are bad."""
    bad = 0
    dtypes = (torch.float16, torch.bfloat16, torch.float32), (torch.float32, torch.float64)
    for architecture, head_dim in itertools.product(TILES, position.PARTS):
        for case in itertools.product(*dtypes):
            bad += _judge(architecture, head_dim, *case, found=compile_merge(architecture, head_dim, *case))
    return bad


def test_compiles_without_spills():
    """Values of another head_dim, with a softcap, a decode step, and a merge.

    In a process of its own, because compiling replaces Triton's driver. It is no fork, which would wait forever for a
    lock that a thread of another test holds.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        kernels = pool.submit(compile_block, 90, 192, torch.bfloat16, "key_ranges", 128, 30.0).result()
        kernels += pool.submit(compile_pages, 90, 128, 128, torch.bfloat16, None, 8).result()
        for dtype in (torch.bfloat16, torch.float32):
            kernels += pool.submit(compile_merge, 90, 128, dtype, torch.float64).result()
    for kernel in kernels:
        assert not kernel.spilled, kernel
        assert kernel.shared <= SHARED[90], kernel
        assert kernel.scalar_copies <= SCALAR_COPIES, kernel
        assert not kernel.faulty, kernel
        if kernel.kernel not in WITHOUT_WGMMA:
            assert kernel.wgmma, kernel


def test_registers_of_a_running_product_are_watched():
    product = "/*0010*/ HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8].tnspB, R24, gsb0 ;\n"
    wait, write = "/*0020*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n", "/*0030*/ @P0 F2FP.BF16.F32.PACK_AB R7, R9, R8 ;\n"
    assert overwritten(product + write) == 1
    assert overwritten(product + wait + write) == 0


def test_products_after_a_copy_need_a_fence():
    copy, fence, product = "cp.async.wait_group 0;\n", "fence.proxy.async.shared::cta;\n", "wgmma.mma_async.sync x;\n"
    assert unfenced(copy + product + product) == 2
    assert unfenced(copy + fence + product) == 0
    assert unfenced(fence + copy + product) == 1


if __name__ == "__main__":
    sys.exit(merges() + pages() + blocks() > 0)
