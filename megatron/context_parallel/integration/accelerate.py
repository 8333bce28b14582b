"""HuggingFace accelerate: `accelerator.maybe_context_parallel` with our strategies."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.accelerate import cut_with, leave_masks_alone, prepare_without_its_ring

from .transformers import register


def use_context_parallel(accelerator: Accelerator, strategy: str, model: PreTrainedModel) -> ContextParallel:
    """Replaces the accelerator's context parallelism with ours. Call it before or after `accelerator.prepare`.

    Before it, models with sliding windows are possible: accelerate's own context parallelism refuses them.

    Within `accelerator.maybe_context_parallel(buffers=..., buffer_seq_dims=...)` each buffer has this rank's tokens, in
    the layout of the strategy. Give it `input_ids`, `position_ids` and `shift_labels`.

    Args:
        accelerator: with `ParallelismConfig(cp_size=...)`.
        strategy: `--cp-strategy`.
        model: the model, before or after `accelerator.prepare`.

    Raises:
        UsageError: the accelerator has no context-parallel ranks.
    """
    parallelism = accelerator.parallelism_config
    if not (parallelism and parallelism.cp_enabled):
        raise UsageError("accelerator: has no context-parallel ranks; create it with ParallelismConfig(cp_size=2)")
    cp = ContextParallel(strategy, group=accelerator.torch_device_mesh["cp"].get_group())
    register(cp, model)
    prepare_without_its_ring(accelerator)
    leave_masks_alone(model)
    cut_with(accelerator, partial(_cut, cp))
    return cp


@contextmanager
def _cut(
    cp: ContextParallel,
    *,
    buffers: list[Tensor] | None = None,
    buffer_seq_dims: list[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
) -> Iterator[None]:
    """Shards the buffers within the block, and restores them after it, except those that need no restoring.

    A sharded buffer gets separate memory, because it may share its own with other tensors, such as labels
    `tokens[:, 1:]` with inputs `tokens[:, :-1]`.
    """
    buffers, dims = buffers or [], buffer_seq_dims or []
    if len(buffers) != len(dims):
        raise UsageError(f"buffer_seq_dims {dims}: there are {len(buffers)} buffers; give each sequence dimension")
    kept = {id(buffer) for buffer in no_restore_buffers or ()}
    wholes = [buffer.data for buffer in buffers]
    parts = [cp.shard(whole, dim).clone() for whole, dim in zip(wholes, dims, strict=True)]
    try:
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.data = part
        yield
    finally:
        for buffer, whole in zip(buffers, wholes, strict=True):
            if id(buffer) not in kept:
                buffer.data = whole
