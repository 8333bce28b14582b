"""A model without memory for its weights: their names and shapes, and their entries in a checkpoint."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.patches.torch_fake_tensors import FakeTensorMode
from megatron.context_parallel.trainer.config.flags import Arguments

from .build import build_gpt, transformer_config

Done = Callable[[int], None]  # called for each weight that is written, with its bytes


def build_meta_model(args: Arguments) -> GPTModel:
    """The model of `args` on one rank, whose weights have names, shapes and dtypes only."""
    config = transformer_config(args)
    config.perform_initialization = False
    cp = ContextParallel(args.cp_layers[0], group=parallel_state.get_context_parallel_group())
    with FakeTensorMode():
        return build_gpt(args, config, cp)


def bytes_of(model: GPTModel) -> int:
    """Bytes of all weights."""
    return sum(weight.nbytes for weight in model.parameters())


def shards_of(model: GPTModel) -> dict[str, list[ShardedTensor | ShardedObject]]:
    """The checkpoint entry of each weight of an outline, by name, and the other entries of its modules' states."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        state: dict[str, Any] = model.sharded_state_dict()
        apply_factories(state)
    return {name: value if isinstance(value, list) else [value] for name, value in state.items()}


def chunk_of(shard: ShardedTensor) -> ChunkStorageMetadata:
    """The slice of a weight in the tensor of a checkpoint, which may be the concatenation of all layers."""
    sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    return ChunkStorageMetadata(offsets=torch.Size(shard.global_offset), sizes=torch.Size(sizes))
