"""Common parts of the GPU checks: sizes, tables, random blocks, and the available backends."""

import json
import os
import tempfile
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel import UsageError
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.interface import Kernel

STEP = 4  # additional keys per row of a step mask: chunks of a cyclic layout gathered from four ranks


@dataclass
class CheckSizes:
    """The sizes to measure; the defaults are the published ones."""

    block_rows: int = 384
    head_dims: tuple[int, ...] = (64, 80, 96, 128, 192, 256)
    ranks: tuple[int, ...] = (2, 4, 6, 8)
    rows_per_rank: tuple[int, ...] = (96, 256)  # the position kernel computes the first, libraries the second
    value_dims: tuple[int, int] = (192, 128)  # of queries and keys, and of values
    far_rows: int = 2**17 + 256  # of 128 heads of 128: more than 2^31 elements
    lengths: tuple[int, ...] = (16384, 4096, 65536)  # the most useful first
    speed_head_dims: tuple[int, ...] = (64, 128)
    heads: tuple[tuple[int, int], ...] = ((16, 1), (2, 8))  # key/value heads, query heads of each: MHA, 8:1 GQA
    decode_rows: int = 8
    decode_tokens: int = 2**17
    decode_layers: int = 32
    decode_sequences: tuple[int, ...] = (1, 8, 32)
    decode_prompt: int = 1024
    repeats: int = 5
    overhead_rows_per_rank: int = 8192
    overhead_heads: tuple[int, int] = (32, 8)
    odd_rows: int = 333  # not a multiple of a tile
    documents: int = 200
    document_tokens: int = 2**20
    document_ranks: int = 8
    memory_rows: tuple[int, ...] = (32768, 131072)
    te_rows: int = 1024
    training_rows: int = 512
    iterations: tuple[int, int] = (10, 20)  # on the CPU before its checkpoint, and in all
    step: tuple[int, int] = (2**15, 6)  # tokens and iterations
    longest: tuple[int, int] = (2**18, 2)  # the same; attention of more takes minutes


@contextmanager
def synchronisations(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yields a function that counts how often the host waited for the GPU, by PyTorch's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: sum("called a synchronizing" in str(warning.message) for warning in caught)
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")


def still_works(device: torch.device) -> bool:
    """Whether a GPU computes for this process. After an invalid access it does not, until the process ends."""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


@dataclass
class CheckReport:
    """The rows of all tables, in memory and, as they come, as lines of JSON in a file.

    Attributes:
        file: gets a line for each row.
        numbers: the rows of each table.
    """

    file: Path | None = None
    numbers: dict[str, list[dict]] = field(default_factory=lambda: defaultdict(list))

    def add(self, table: str, **row: object) -> None:
        self.numbers[table].append(row)
        self.write(table=table, **row)

    def write(self, **line: object) -> None:
        """Adds a line to the file alone."""
        if self.file:
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")


@contextmanager
def row_of(report: CheckReport, table: str, **row: Any) -> Iterator[dict[str, Any]]:
    """Adds a row, with what the block adds to it. If the block raises an error, the row has it, and fails."""
    try:
        yield row
    except Exception as error:  # of a library, of a compiler, or a lack of memory: the other rows come all the same
        traceback.print_exc()
        row |= {"verdict": "FAIL", "wrong": said(error)}
    report.add(table, **row)


def has_megatron(report: CheckReport, table: str) -> bool:
    """Whether megatron-core is installed. If not, the table says why it is empty."""
    if find_spec("megatron.core"):
        return True
    report.add(table, left_out="needs megatron-core (pip install megatron-core)")
    return False


def print_table(title: str, rows: list[dict]) -> None:
    """Plain text with right-aligned columns; without rich, which a GPU image may lack. Rows may lack columns."""
    columns = [*dict.fromkeys(column for row in rows for column in row)]
    lines = [columns]
    for row in rows:
        lines.append([_cell(row.get(column, "")) for column in columns])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: object) -> str:
    if value is None:
        return "not measured"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def said(error: BaseException) -> str:
    """The kind of an error and its first line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


class RandomBlock(NamedTuple):
    """q [s, B, G, d], dout [s, B, G, dv], k [t, B, d], v [t, B, dv]."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @classmethod
    def random(
        cls,
        rows: int,
        keys: int,
        heads: int,
        group: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        value_dim: int | None = None,
    ) -> "RandomBlock":
        torch.manual_seed(rows + dim)
        of_values = value_dim or dim
        shapes = (
            (rows, heads, group, dim),
            (keys, heads, dim),
            (keys, heads, of_values),
            (rows, heads, group, of_values),
        )
        return cls(*(torch.randn(shape, device=device).to(dtype) for shape in shapes))


def kernels(
    names: list[str], device: torch.device, dtype: torch.dtype, dim: int, **options: Any
) -> Iterator[tuple[str, Kernel]]:
    """The backends that support this on this host; `options` are those of `kernel_for`."""
    for name in names:
        try:
            yield name, kernel_for(device, dtype, dim, name, **options)
        except UsageError:
            continue


@contextmanager
def deterministic_mode() -> Iterator[None]:
    """PyTorch's deterministic mode, in which an operation that is not deterministic raises an error."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def world_of_one(device: torch.device, bound: bool = False) -> Iterator[None]:
    """This process is the only rank of the world, which is bound to the device or not."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{os.path.join(folder, 'store')}"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1, device_id=device if bound else None)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def model_parallel() -> Iterator[None]:
    """megatron-core has its groups, of this one rank."""
    from megatron.core import parallel_state

    from megatron.context_parallel.patches.cpu_host import support_cpu_host

    support_cpu_host()
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)  # gloo needs a network
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
