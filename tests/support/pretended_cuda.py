"""A process with a pretended CUDA device: whole programs run as on a host with GPUs, and compute on the CPU.

`python -m tests.support.pretended_cuda [-m] PROGRAM ARGUMENTS...` runs a program so. `pretended_cuda.cpp` is the device
as PyTorch's C++ sees it, with threads of its own for backward passes. `pretended_streams.cpp` finds races of streams,
`pretended_nccl.cpp` is NCCL, and `pretended_cuda_module.py` is what Python asks of `torch.cuda`. A library is compiled
once (a minute), and loaded before PyTorch looks for a GPU.
"""

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = [HERE / f"pretended_{part}.cpp" for part in ("cuda", "streams", "nccl")]
HEADER = HERE / "pretended_cuda.hpp"
BUILD = HERE.parents[1] / "build" / "pretended_cuda"


def library() -> Path:
    """The compiled device, for the PyTorch that is installed."""
    BUILD.mkdir(parents=True, exist_ok=True)
    include = _torch() / "include"
    places = [include, include / "torch/csrc/api/include", sysconfig.get_path("include")]
    # PyTorch's own classes have other members without NDEBUG.
    compiler = ["g++", "-O0", "-DNDEBUG", "-w", "-fPIC", "-std=c++20", *[f"-I{place}" for place in places], "-c"]
    objects = [_made(_name([source, HEADER], "o"), [*compiler, str(source)]) for source in SOURCES]
    for _, job in objects:
        assert not (job and job.wait()), "the pretended device does not compile"
    for made, job in objects:
        _put(made, job)
    link = ["g++", "-shared", *[str(made) for made, _ in objects], f"-L{_torch() / 'lib'}", "-lc10", "-ltorch_cpu"]
    target, job = _made(_name([*SOURCES, HEADER], "so"), link)
    assert not (job and job.wait())
    _put(target, job)
    return target


def _name(of: list[Path], kind: str) -> Path:
    """The file that is made of some sources for the PyTorch and the Python that are here."""
    versions = f"{importlib.metadata.version('torch')} {sys.version}".encode()
    text = b"".join(path.read_bytes() for path in of)
    return BUILD / f"{of[0].stem}-{hashlib.sha256(text + versions).hexdigest()[:16]}.{kind}"


def _made(target: Path, command: list[str]) -> tuple[Path, subprocess.Popen | None]:
    """A file, and what makes it meanwhile if it is not there."""
    return target, None if target.exists() else subprocess.Popen([*command, "-o", str(_partial(target))])


def _put(target: Path, job: subprocess.Popen | None) -> None:
    if job:
        _partial(target).rename(target)


def _partial(target: Path) -> Path:
    return target.with_suffix(f".{os.getpid()}")


def _torch() -> Path:
    return Path(importlib.util.find_spec("torch").submodule_search_locations[0])


def pretend(capability: tuple[int, int] = (9, 0)) -> None:
    """From now on this process has a GPU. PyTorch must not have been imported."""
    assert "torch" not in sys.modules, "PyTorch has already asked for GPUs"
    path = library()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch() / "lib" / name), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    from tests.support import pretended_cuda_module

    pretended_cuda_module.install(capability, path)


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
