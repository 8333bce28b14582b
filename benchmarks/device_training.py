"""A training step on an emulated device: matrix products and the optimizer take its time, too."""

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor

from benchmarks.device import EmulatedDevice
from megatron.context_parallel.cluster.step.layer_time import LayerTime
from megatron.context_parallel.trainer.checkpoint.train_state import TrainState


class _Product(torch.autograd.Function):
    """[..., k] times a weight [n, k]: zeros after the device's time of one product, and of two in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, seconds: float, device: EmulatedDevice) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rest = seconds, device
        with device.work(seconds):
            return x.new_zeros(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        seconds, device = ctx.rest
        with device.work(2 * seconds):
            return x.new_zeros(x.shape), weight.new_zeros(weight.shape), None, None


def products_take_time(device: EmulatedDevice, times: LayerTime) -> None:
    """From now on, linear layers of megatron-core in this process take the device's time while it does not compute."""
    computed = layers.linear_with_grad_accumulation_and_async_allreduce

    def product(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: object, **named: object) -> Tensor:
        if device.computes or bias is not None:
            return computed(input, weight, bias, *rest, **named)
        return _Product.apply(input, weight, times.product(weight.shape[1], weight.shape[0]), device)

    product.warned = True  # megatron-core keeps here whether it has warned
    layers.linear_with_grad_accumulation_and_async_allreduce = product


def optimizer_takes_time(state: TrainState, device: EmulatedDevice, times: LayerTime) -> None:
    """From now on, its optimizer takes the device's time and changes nothing while the device does not compute."""
    computed = state.optimizer.step
    parameters = sum(weight.numel() for chunk in state.model for weight in chunk.parameters())
    seconds = times.optimizer(parameters // times.run.shards("optim"))

    def step() -> tuple[bool, float, None]:
        if device.computes:
            return computed()
        with device.work(seconds):
            return True, 0.0, None

    state.optimizer.step = step
