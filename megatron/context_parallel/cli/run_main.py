"""The common start and end of all programs."""

import atexit
import gc
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import NoReturn

from megatron.context_parallel import progress
from megatron.context_parallel.errors import RankError, UsageError
from megatron.context_parallel.patches import release_of

NEEDS = {  # module: (its package, the extra that installs it)
    "megatron.core": ("megatron-core", "train"),
    "psutil": ("psutil", "train"),
    "xxhash": ("xxhash", "train"),
    "yaml": ("pyyaml", "train"),
    "matplotlib": ("matplotlib", "train"),
    "networkx": ("networkx", "train"),
    "rich": ("rich", "train"),
    "tensorboard": ("tensorboard", "train"),
    "transformers": ("transformers", "tokenizers"),
    "sentencepiece": ("sentencepiece", "tokenizers"),
    "safetensors": ("safetensors", "tokenizers"),
    "starlette": ("starlette", "serve"),
    "uvicorn": ("uvicorn", "serve"),
    "pydantic": ("pydantic", "serve"),
    "prometheus_client": ("prometheus-client", "serve"),
    "wandb": ("wandb", "wandb"),
    "scipy": ("scipy", "calibrate"),
}
# Modules whose only warnings tell users nothing.
QUIET = (
    "torch.utils.cpp_extension",  # a CUDA toolkit, and no GPU
    # megatron-core 0.19: how it would rather be called
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
)
TESTED = {"torch": "2.11 to 2.15", "megatron-core": "0.16 to 0.19"}  # docs/versions.md


def ignore_warnings_of_libraries() -> None:
    """Hide libraries' warnings about each other's versions, which users cannot fix. Call it before importing torch.

    Also hides the stack that torch prints on each rank that loses another one: the watch names the lost rank.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", module=r"(megatron\.core|torch)\b")
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def imports() -> Iterator[None]:
    """Imports without garbage collection, then or later, of what they made. It would take a sixth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_main(main: Callable[[], int | None], program: str | None = None) -> NoReturn:
    """Exits with the status that `main` returns (None: 0).

    Each line of a UsageError is printed after the name of the program (default: of its file), and the status is 2. The
    same holds for a package that is not installed, or whose release lacks a name. Ctrl-C prints one line, and the
    status is 130.
    """
    _show_progress()
    atexit.register(_let_collect)
    patience = 30  # seconds
    try:
        sys.exit(main())
    except UsageError as error:
        message = str(error)
        patience = 0 if isinstance(error, RankError) else patience
    except ModuleNotFoundError as error:
        message = _how_to_install(error)
    except ImportError as error:
        message = _which_release(error)
    except KeyboardInterrupt:
        if progress.is_first_rank():
            print("interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # Rank 0 prints it for all ranks, and its exit ends the job. A rank that is still alive has its own error.
        time.sleep(patience)
        message = f"rank {rank}: {message}"
    start = f"{program or os.path.basename(sys.argv[0])}: error: "
    print("\n".join(start + line for line in message.splitlines()), file=sys.stderr, flush=True)
    sys.exit(2)


def announce(doing: str) -> None:
    """Prints on the first rank's standard error what will take some seconds."""
    if progress.is_first_rank():
        print(f"{doing} ...", file=sys.stderr, flush=True)


def _let_collect() -> None:
    """Triton's bindings print pages about what the interpreter does not collect at its end."""
    if "triton" in sys.modules:
        gc.unfreeze()


def _show_progress() -> None:
    progress.logger.handlers = [logging.StreamHandler()]
    progress.logger.setLevel(logging.INFO)
    progress.logger.propagate = False


def _how_to_install(error: ModuleNotFoundError) -> str:
    """Raises the error again if no extra installs the module: then this project is broken."""
    missing = error.name or ""
    for module, (package, extra) in NEEDS.items():
        if missing == module or missing.startswith(f"{module}."):
            return f"needs {package}: pip install 'megatron-context-parallel[{extra}]'"
    raise error


def _which_release(error: ImportError) -> str:
    """Raises the error again if the library's release was tested: then this project is broken."""
    package = "megatron-core" if (error.name or "").startswith("megatron.core") else (error.name or "").split(".")[0]
    if package in TESTED:
        installed = metadata.version(package)
        first, last = map(release_of, TESTED[package].split(" to "))
        if not first <= release_of(installed) <= last:
            return f"{package} {installed}: not supported; install {package} {TESTED[package]}"
    raise error
