"""A process with a pretended CUDA device: whole programs run as on a host with GPUs, and compute on the CPU.

`python -m tests.support.pretended_cuda [-m] PROGRAM ARGUMENTS...` runs a program so. `pretended_cuda.cpp` is the device
as PyTorch's C++ sees it, with threads of its own for backward passes. What Python asks of `torch.cuda` is below.
A library is compiled once (10 seconds), and loaded before PyTorch looks for a GPU.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cpp")
BUILD = SOURCE.parents[2] / "build" / "pretended_cuda"


def library() -> Path:
    """The compiled device, for the PyTorch that is installed."""
    version = importlib.metadata.version("torch")
    target = BUILD / f"{hashlib.sha256(SOURCE.read_bytes() + version.encode()).hexdigest()[:16]}.so"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        places = [
            f"-I{_torch() / 'include'}",
            f"-I{_torch() / 'include/torch/csrc/api/include'}",
            f"-L{_torch() / 'lib'}",
        ]
        partial = target.with_suffix(f".{os.getpid()}")
        command = ["g++", "-O0", "-w", "-shared", "-fPIC", "-std=c++20", *places, str(SOURCE), "-o", str(partial)]
        subprocess.run([*command, "-lc10", "-ltorch_cpu"], check=True)
        partial.rename(target)
    return target


def _torch() -> Path:
    return Path(importlib.util.find_spec("torch").submodule_search_locations[0])


def pretend(capability: tuple[int, int] = (9, 0)) -> None:
    """From now on this process has a GPU. PyTorch must not have been imported."""
    assert "torch" not in sys.modules, "PyTorch has already asked for GPUs"
    path = library()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), ctypes.RTLD_GLOBAL)
    with _without_warnings_of_torch():
        ctypes.CDLL(str(path))
    from tests.support import pretended_cuda_module

    pretended_cuda_module.install(capability)


@contextmanager
def _without_warnings_of_torch() -> Iterator[None]:
    """Kernels of collectives are replaced, of which C++ warns."""
    real, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(real, 2)
        os.close(real)
        os.close(nowhere)


def main(words: list[str]) -> None:
    """Runs a program or `-m` a module with its arguments."""
    pretend()
    sys.argv = words[words[0] == "-m" :]
    if words[0] == "-m":
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
