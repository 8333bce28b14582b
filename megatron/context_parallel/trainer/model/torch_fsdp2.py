"""`--use-torch-fsdp2`: PyTorch's FSDP2, whose layers are sharded as soon as they are built."""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from megatron.context_parallel.patches.megatron_data_parallel import BaseDataParallel
from megatron.context_parallel.trainer.config.flags import Arguments


class Sharder:
    """Shards parts of a model over the data and context ranks: each rank keeps its rows of every weight."""

    def __init__(self, args: Arguments) -> None:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.device = torch.device(torch.cuda.current_device())
        self.mesh = DeviceMesh.from_group(group, self.device.type)
        place = OffloadPolicy()
        if args.optimizer_cpu_offload:
            place = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        policy = MixedPrecisionPolicy(args.params_dtype, torch.float32, cast_forward_inputs=False)
        self.policies: dict[str, Any] = {"mp_policy": policy, "offload_policy": place}
        self.attributes: list[tuple[torch.nn.Module, str, dict[str, Any]]] = []  # of weights: module, name, attributes

    def shard(self, part: torch.nn.Module) -> FSDPModule:
        """Shard the weights of a part of a model that are still whole. They keep their dtype."""
        for module in part.modules():
            for name, weight in module.named_parameters(recurse=False):
                if not isinstance(weight, DTensor):
                    self.attributes.append((module, name, vars(weight)))
        for tensor in (*part.parameters(), *part.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(self.device)
        sharded = fully_shard(part, mesh=self.mesh, **self.policies)
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        return sharded

    def restore_attributes(self) -> None:
        """Give the shards megatron-core's attributes of the whole weights, such as that of an embedding.

        Sharding drops them, and so does each change of dtype.
        """
        for module, name, attributes in self.attributes:
            vars(getattr(module, name)).update(attributes)


class ShardedLayer(TransformerLayer):
    """A layer that is sharded when it is built. So no device has the whole weights of all layers."""

    def __init__(self, *given: Any, sharder: Sharder, **named: Any) -> None:
        super().__init__(*given, **named)
        sharder.shard(self)


def shard_when_built(layer: ModuleSpec, sharder: Sharder) -> None:
    """Change the spec of layers so that each is sharded when it is built."""
    layer.module, layer.params = ShardedLayer, {**layer.params, "sharder": sharder}


class TorchFSDP2(BaseDataParallel):
    """A model of sharded layers: each rank keeps its rows of every weight, gradient and moment in float32.

    Layers are gathered in the model's dtype when they are needed. With `--optimizer-cpu-offload` the rows are in host
    memory: weights are copied to the device to be gathered, and summed gradients back.

    megatron-core's own FSDP2 wrapper averages gradients, but `calculate_per_token_loss` needs their sum. It cannot
    scale by the token count either.
    """

    def __init__(
        self,
        args: Arguments,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        sharder: Sharder,
    ) -> None:
        super().__init__(config=config, module=module)
        self.ddp_config, self.on_host = ddp_config, args.optimizer_cpu_offload
        # A tied embedding is gathered with the whole model: the output layer needs it too.
        for part in module.modules() if args.untie_embeddings_and_output_weights else ():
            if isinstance(part, LanguageModelEmbedding):
                sharder.shard(part).set_unshard_in_backward(False)  # its gradient does not depend on its weights
        sharder.shard(module)
        module.float()  # the shards
        sharder.restore_attributes()

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
