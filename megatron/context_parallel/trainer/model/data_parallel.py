"""Data parallelism over data and context ranks: the wrapper of a model that sums gradients and gathers weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedBase
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer import TransformerConfig, TransformerLayer
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron.context_parallel.patches.cpu_host import on_cpu_mesh
from megatron.context_parallel.patches.megatron_data_parallel import BaseDataParallel
from megatron.context_parallel.trainer.config.flags import Arguments


class TorchFSDP2(BaseDataParallel):
    """`--use-torch-fsdp2`: each rank keeps its rows of every weight, gradient and moment in float32.

    Layers are gathered in the model's dtype when they are needed. With `--optimizer-cpu-offload` the rows are in host
    memory: weights are copied to the device to be gathered, and summed gradients back.

    megatron-core's own FSDP2 wrapper averages gradients, but `calculate_per_token_loss` needs their sum. It cannot
    scale by the token count either.
    """

    def __init__(self, args: Arguments, config: TransformerConfig, module: torch.nn.Module) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config = ddp_config(args)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        mesh = DeviceMesh.from_group(group, "cuda" if torch.cuda.is_available() else "cpu")
        policy = MixedPrecisionPolicy(args.params_dtype, torch.float32, cast_forward_inputs=False)
        self.on_host = args.optimizer_cpu_offload
        place = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if self.on_host else OffloadPolicy()
        marks = {name: vars(parameter) for name, parameter in module.named_parameters()}
        # A tied embedding is gathered with the whole model: the output layer needs it too.
        kinds = (TransformerLayer, *((LanguageModelEmbedding,) if args.untie_embeddings_and_output_weights else ()))
        units = [unit for unit in module.modules() if isinstance(unit, kinds)]
        for unit in (*units, module):
            _widen(unit)
            sharded = fully_shard(unit, mesh=mesh, mp_policy=policy, offload_policy=place)
            assert isinstance(sharded, FSDPModule)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            if isinstance(unit, LanguageModelEmbedding):
                sharded.set_unshard_in_backward(False)  # its gradient does not depend on its weights
        for name, parameter in module.named_parameters():
            vars(parameter).update(marks[name])  # megatron-core's attributes, such as that of an embedding

    @torch.no_grad()
    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all gradients."""
        if self.on_host:
            scaling_factor = float(scaling_factor)  # of the device
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad *= scaling_factor

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Does nothing: the backward pass has already summed the gradients."""

    def drop_empty_gradients(self) -> None:
        """Leave weights of which this rank has no rows out of the update.

        Beside an empty tensor, Transformer Engine's kernels for many tensors (until its pull request 3212) and Apex's
        leave out others, or write beyond their list.
        """
        for parameter in self.parameters():
            if isinstance(parameter.grad, DTensor) and not parameter.grad.to_local().numel():
                parameter.grad = None


def _widen(unit: torch.nn.Module) -> None:
    """Convert the weights of a module that are still whole to float32: those of a whole model may not fit a device."""
    for tensor in (*unit.parameters(), *unit.buffers()):
        if tensor.is_floating_point() and not isinstance(tensor, DTensor):
            tensor.data = tensor.data.float()


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


def wrap(args: Arguments, config: TransformerConfig, module: torch.nn.Module, index: int) -> DataParallel:
    """Model chunk `index` of a rank, ready for the reduction of gradients."""
    if not (args.use_megatron_fsdp or args.use_torch_fsdp2):
        # Only the first chunk's buckets can overlap with computation: later chunks reduce in one piece.
        return DistributedDataParallel(config, ddp_config(args), module, disable_bucketing=index > 0)
    known = descriptions(module)
    if args.use_torch_fsdp2:
        sharded: DataParallel = TorchFSDP2(args, config, module)
    else:
        with on_cpu_mesh():
            device = None if torch.cuda.is_available() else torch.device("cpu")
            sharded = FullyShardedDataParallel(config, ddp_config(args), module, device=device)
    sharded.descriptions = known
    return sharded


def finish_gradients(model: list[DataParallel], *given: Any, **named: Any) -> None:
    """megatron-core's `finalize_model_grads`; then the gradients are ready for the optimizer."""
    finalize_model_grads(model, *given, **named)
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
        without[key] = torch.nn.Parameter(weight.detach().to("meta"), requires_grad=weight.requires_grad)
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
