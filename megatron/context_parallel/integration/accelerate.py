"""HuggingFace accelerate: `accelerator.maybe_context_parallel` with our strategies."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from ..context import ContextParallel
from ..errors import UsageError
from .transformers import register


def use_context_parallel(accelerator: Accelerator, strategy: str, model: PreTrainedModel) -> ContextParallel:
    """Makes the accelerator's context parallelism ours. Call it after `accelerator.prepare`, which puts PyTorch's in.

    Within `accelerator.maybe_context_parallel(buffers=..., buffer_seq_dims=...)` each buffer has this rank's tokens, in
    the layout of the strategy. Give it `input_ids`, `position_ids` and `shift_labels`.

    Args:
        accelerator: with `ParallelismConfig(cp_size=...)`.
        strategy: `--cp-strategy`.
        model: as `accelerator.prepare` has returned it, or before.

    Raises:
        UsageError: the accelerator has no context-parallel ranks.
    """
    parallelism = accelerator.parallelism_config
    if not (parallelism and parallelism.cp_enabled):
        raise UsageError("accelerator: has no context-parallel ranks; give it ParallelismConfig(cp_size=2)")
    cp = ContextParallel(strategy, group=accelerator.torch_device_mesh["cp"].get_group())
    register(cp, model)
    accelerator._cp_context = partial(_cut, cp)  # it has no other way in
    return cp


@contextmanager
def _cut(
    cp: ContextParallel,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Cuts the buffers in place, and makes them whole again behind, except those that need not be."""
    buffers, dims, kept = buffers or [], buffer_seq_dims or [], no_restore_buffers or set()
    if len(buffers) != len(dims):
        raise UsageError(f"buffer_seq_dims {dims}: of {len(buffers)} buffers; give the dimension of the tokens of each")
    wholes = [None if buffer in kept else buffer.clone() for buffer in buffers]
    for buffer, dim in zip(buffers, dims, strict=True):
        part = cp.shard(buffer, dim).clone()
        buffer.resize_(part.shape).copy_(part)
    yield
    for buffer, whole in zip(buffers, wholes, strict=True):
        if whole is not None:
            buffer.resize_(whole.shape).copy_(whole)
