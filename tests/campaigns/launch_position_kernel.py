"""Launches the position kernel through Triton's launcher, without a GPU: a stand-in for libcuda.so.1 counts launches.

It compiles for sm_90. It needs a C compiler, as Triton itself does.
"""

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import triton
from triton.backends.nvidia import driver

from megatron.context_parallel.kernels.delta_triton import output_with_fused
from megatron.context_parallel.kernels.interface import BlockGrad, Scores
from megatron.context_parallel.kernels.masks import CAUSAL, FULL, KeyRanges, PieceMask
from megatron.context_parallel.kernels.merge_triton import merge_fused
from megatron.context_parallel.kernels.position import kernel as position

from .compile_kernels import Driver

LIBRARY = """
#include <cuda.h>
int launches;
CUresult cuLaunchKernelEx(const CUlaunchConfig* how, CUfunction kernel, void** arguments, void** more) {
  return how->gridDimX && how->blockDimX && ++launches ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuPointerGetAttribute(void* found, CUpointer_attribute what, CUdeviceptr address) {
  *(CUdeviceptr*)found = address;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* current) { *current = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int number) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction kernel, CUfunction_attribute what, int value) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char** text) { *text = "refused"; return CUDA_SUCCESS; }
"""


class LaunchingDriver(Driver):
    """A driver that loads nothing and launches into the library above."""

    launcher_cls = driver.CudaLauncher
    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda *_: (1, 2, 0, 0, 1024),
        unload_module=lambda *_: None,
    )


def load_library(folder: Path) -> ctypes.CDLL:
    """Builds the stand-in, and loads it before Triton looks for the real one."""
    source, library = folder / "cuda.c", folder / "libcuda.so.1"
    source.write_text(LIBRARY)
    headers = Path(driver.__file__).parent / "include"
    options = ["-shared", "-fPIC", "-w", f"-I{headers}", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["cc", *options, "-o", library, source], check=True)
    (folder / "libcuda.so").symlink_to(library)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def launch(rows: int, dim: int, value_dim: int, softcap: float, deterministic: bool, mask: PieceMask) -> None:
    """Forward, backward and a merge of a block."""
    kernel = position.PositionKernel(torch.device("meta"), deterministic=deterministic)
    q, dout = (torch.zeros(rows, 4, 2, d, dtype=torch.bfloat16) for d in (dim, value_dim))
    k, v = (torch.zeros(rows, 4, d, dtype=torch.bfloat16) for d in (dim, value_dim))
    scores = Scores(0.1, softcap)
    out, lse = kernel.forward(q, k, v, mask, scores)
    kernel.backward(BlockGrad(dout, q, k, v, lse, lse, mask), scores)
    merge_fused(out.float(), lse.double(), out, lse)
    output_with_fused(lse, dout)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = load_library(Path(folder))
        triton.runtime.driver.set_active(LaunchingDriver(90))
        position._architecture = lambda device: 90
        up = torch.arange(1, 65, dtype=torch.int32)[None]
        ranges = KeyRanges(0 * up, up)
        cases: list[tuple] = [(64, 64, 64, 0.0, deterministic, ranges) for deterministic in (False, True)]
        cases += [(64, 192, 128, 30.0, True, ranges), (64, 96, 96, 0.0, True, CAUSAL), (64, 64, 64, 0.0, True, FULL)]
        cases += [(3, 64, 64, 0.0, True, KeyRanges(up[:, :3] * 0, up[:, :3]))]
        for *case, mask in cases:
            before = ctypes.c_int.in_dll(library, "launches").value
            launch(*case, mask)
            name = "key_ranges" if isinstance(mask, KeyRanges) else mask
            print(*case, name, ctypes.c_int.in_dll(library, "launches").value - before, "launches", flush=True)


if __name__ == "__main__":
    main()
