"""Outputs of modules that full recomputation keeps, instead of computing them again (`--recompute-whitelist`).

Megatron's checkpoint runs a layer twice: in the forward pass without gradients, and in the backward pass with them. A
module named here runs in the first of these only. Its graph is kept without its input, which the second run makes.
"""

from collections import deque
from typing import Any, NamedTuple

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import is_checkpointing
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from .norm import Norm

# The names in a layer of megatron-core, for each name in the whitelist.
MODULES = {
    "qkv": ("linear_qkv",),
    "proj": ("linear_proj",),
    "fc1": ("linear_fc1",),
    "fc2": ("linear_fc2",),
    "norms": ("input_layernorm", "pre_mlp_layernorm", "q_layernorm", "k_layernorm"),
}


def keep_outputs(model: GPTModel, names: list[str]) -> None:
    """Makes recomputed layers of `model` keep the outputs of the modules that `names` stands for (`MODULES`).

    Supported are megatron-core's linear layers, with tensor and sequence parallelism, and our norms.
    """
    parts = {part for name in names for part in MODULES.get(name, ())}
    for name, module in model.decoder.named_modules():
        if name.split(".")[-1] in parts and isinstance(module, (ColumnParallelLinear, RowParallelLinear, Norm)):
            module.forward = KeptOutputs(module)  # type: ignore[method-assign]


class KeptOutputs:
    """The forward function of a module that runs once where Megatron's checkpoint runs its layer twice.

    Attributes:
        kept: for each run that waits for its backward pass the output and what autograd saved beside input and weights.
            Recomputations follow the order of their forward passes.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module, self._forward = module, module.forward
        self.kept: deque[tuple[Tensor, ...]] = deque()
        self._graphs: deque[_Graph] = deque()

    def __call__(self, x: Tensor, *args: Any, **named: Any) -> Any:
        if not is_checkpointing():
            return self._forward(x, *args, **named)
        if not torch.is_grad_enabled():
            return self._run(x, *args, **named)
        output, *saved = self.kept.popleft()
        graph = self._graphs.popleft()
        graph.saved.tensors = saved
        out = _FromGraph.apply(graph, output, x)
        return (out, *graph.others) if graph.others else out

    def _run(self, x: Tensor, *args: Any, **named: Any) -> Any:
        saved = _SavedTensors(x, self._module)
        with torch.enable_grad(), saved_tensors_hooks(saved.pack, saved.unpack):
            start = torch.zeros((), requires_grad=True)
            result = self._forward(_Input.apply(saved, x.detach(), start), *args, **named)
        out, *others = result if isinstance(result, tuple) else (result,)
        self.kept.append((out.detach(), *saved.tensors))
        saved.tensors = []
        self._graphs.append(_Graph(get_gradient_edge(out), saved, tuple(others)))
        return (out.detach(), *others) if others else out.detach()


class _SavedTensors:
    """What the graph of a module saves: places in its input, its weights, and other tensors.

    Attributes:
        tensors: the others. They are elsewhere until the backward pass.
        input: the recomputed input, in the backward pass.
        gradient: that of the input, after the backward pass.
    """

    def __init__(self, x: Tensor, module: torch.nn.Module) -> None:
        self.tensors: list[Tensor] = []
        self.input: Tensor | None = None
        self.gradient: Tensor | None = None
        self._input_storage = _storage(x)
        self._weight_storages = {_storage(weight) for weight in module.parameters()}
        self._places: dict[tuple, int] = {}  # a tensor that is saved twice is kept once

    def pack(self, tensor: Tensor) -> Any:
        storage = _storage(tensor)
        if storage in self._weight_storages:
            return tensor
        place = tensor.shape, tensor.stride(), tensor.storage_offset()
        if storage == self._input_storage:
            return place
        index = self._places.setdefault((storage, tensor.dtype, *place), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor.detach())
        return index

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, tuple):
            assert self.input is not None
            return self.input.as_strided(*saved)
        return self.tensors[saved] if isinstance(saved, int) else saved


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Graph(NamedTuple):
    """The graph of one run of a module, without tensors, and what the module returned beside its output."""

    output: GradientEdge
    saved: _SavedTensors
    others: tuple


class _Input(torch.autograd.Function):
    """The input of a module, where its graph ends."""

    @staticmethod
    def forward(ctx: Any, saved: _SavedTensors, x: Tensor, start: Tensor) -> Tensor:
        ctx.saved = saved
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        ctx.saved.gradient = gradient
        return None, None, None


class _FromGraph(torch.autograd.Function):
    """A kept output, whose backward pass is that of the kept graph with the recomputed input."""

    @staticmethod
    def forward(ctx: Any, graph: _Graph, output: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.graph = graph
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        saved = ctx.graph.saved
        (saved.input,) = ctx.saved_tensors
        torch.autograd.backward([ctx.graph.output], [gradient])
        found = saved.gradient
        saved.input, saved.tensors, saved.gradient = None, [], None
        return None, None, found
