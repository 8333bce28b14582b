"""Data parallelism over data and context ranks: the wrapper of a model that sums gradients and gathers weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from megatron.context_parallel.patches.cpu_host import on_cpu_mesh
from megatron.context_parallel.trainer.config.flags import Arguments

from .torch_fsdp2 import Sharder, TorchFSDP2

DataParallel: TypeAlias = DistributedDataParallel | FullyShardedDataParallel | TorchFSDP2


def ddp_config(args: Arguments) -> DistributedDataParallelConfig:
    """megatron-core's configuration of data parallelism and sharding."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap_grad_reduce,
        overlap_param_gather=args.overlap_param_gather,
        use_distributed_optimizer=args.use_distributed_optimizer,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        use_megatron_fsdp=args.use_megatron_fsdp,
        data_parallel_sharding_strategy=args.data_parallel_sharding_strategy,
        **_precision_of_megatron_fsdp(args),
    )


def _precision_of_megatron_fsdp(args: Arguments) -> dict[str, Any]:
    """Gradients in float32, and a copy of the weights in float32 where they are not already."""
    copies = args.params_dtype is not torch.float32
    if hasattr(DistributedDataParallelConfig, "preserve_fp32_weights"):  # 0.16, whose gradients follow the flag above
        return {"preserve_fp32_weights": copies}
    weights = torch.float32 if copies else None
    return {"megatron_fsdp_main_params_dtype": weights, "megatron_fsdp_main_grads_dtype": torch.float32}


def wrap(
    args: Arguments, config: TransformerConfig, module: torch.nn.Module, index: int, sharder: Sharder | None
) -> DataParallel:
    """Model chunk `index` of a rank, ready for the reduction of gradients. `sharder`: with `--use-torch-fsdp2`."""
    if not (args.use_megatron_fsdp or args.use_torch_fsdp2):
        # Only the first chunk's buckets can overlap with computation: later chunks reduce in one piece.
        return DistributedDataParallel(config, ddp_config(args), module, disable_bucketing=index > 0)
    if sharder:
        sharder.restore_attributes()
    known = descriptions(module)
    if sharder:
        sharded: DataParallel = TorchFSDP2(args, config, ddp_config(args), module, sharder)
    else:
        with on_cpu_mesh():
            device = None if torch.cuda.is_available() else torch.device("cpu")
            sharded = FullyShardedDataParallel(config, ddp_config(args), module, device=device)
    sharded.descriptions = known
    return sharded


def finish_gradients(model: list[DataParallel], num_tokens: Tensor, **named: Any) -> None:
    """megatron-core's `finalize_model_grads`; then the gradients are ready for the optimizer.

    Args:
        num_tokens: the tokens with a loss of this rank, int32 []; afterwards of all ranks. If there are none,
            megatron-core divides by nothing. So the auxiliary losses of experts, which are sums over tokens, would get
            gradients of any size: they get none.
    """
    finalize_model_grads(model, num_tokens, **named)
    if model[0].config.num_moe_experts and not num_tokens:
        for chunk in model:
            chunk.scale_gradients(0.0)
    for chunk in model:
        if isinstance(chunk, TorchFSDP2):
            chunk.drop_empty_gradients()


def descriptions(module: torch.nn.Module) -> dict[str, tuple[ShardedBase, str]]:
    """The checkpoint entries of a model, with the names of its weights, or "". Call it before FSDP wraps the model."""
    with _weights_on_meta(module):
        names = {id(weight): name for name, weight in module.named_parameters()}
        entries = module.sharded_state_dict()  # type: ignore[operator]
        return {name: (entry, names.get(id(entry.data), "")) for name, entry in entries.items()}


@contextmanager
def _weights_on_meta(module: torch.nn.Module) -> Iterator[None]:
    """Weights without memory, for what keeps them: entries of megatron-core 0.19 also have them in their functions."""
    places = [(part, *named) for part in module.modules() for named in part.named_parameters(recurse=False)]
    weights = {id(weight): weight for *_, weight in places}
    without = {}
    for key, weight in weights.items():
        whole = torch.empty(weight.shape, dtype=weight.dtype, device="meta")  # a layer may be sharded already
        without[key] = torch.nn.Parameter(whole, requires_grad=weight.requires_grad)
        vars(without[key]).update(vars(weight))  # how megatron-core shards it
    for part, name, weight in places:
        part.register_parameter(name, without[id(weight)])
    try:
        yield
    finally:
        for part, name, weight in places:
            part.register_parameter(name, weight)


@contextmanager
def weights_gathered(args: Arguments, model: list[DataParallel]) -> Iterator[None]:
    """Update all weights on every rank. With `--overlap-param-gather` the last ones arrive in the next forward pass.

    Afterwards FSDP2 has each rank's rows again. A forward pass alone leaves the weights outside the layers gathered.
    """
    late = [chunk for chunk in model if isinstance(chunk, DistributedDataParallel) and args.overlap_param_gather]
    for chunk in late:
        chunk.disable_forward_pre_hook()
    try:
        yield
    finally:
        for chunk in late:
            chunk.enable_forward_pre_hook()
        for chunk in model:
            if isinstance(chunk.module, FSDPModule):
                chunk.module.reshard()
