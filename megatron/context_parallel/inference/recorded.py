"""A forward pass as a recorded list of operations, without the Python code of the modules."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import megatron.core.utils
import torch
import torch.nn.functional as F
from torch import Tensor, fx, library
from torch.fx.experimental.proxy_tensor import make_fx

from megatron.context_parallel.integration.spec import AttentionOverride
from megatron.context_parallel.runtime.comm.flight_recorder import recorder

from .cached_model import CachedModel, PassInputs

_library = library.Library("megatron_context_parallel", "FRAGMENT")
_library.define("attend(Tensor q, Tensor k, Tensor v, int layer) -> Tensor")
_library.impl(
    "attend",
    lambda q, k, v, layer: q.new_empty(*q.shape[:3], v.shape[-1]),  # a placeholder for the recording
    "CompositeExplicitAutograd",
)
_attend = torch.ops.megatron_context_parallel.attend.default


class Recorded:
    """A recorded pass for inputs with certain shapes. It replaces the model and takes the same arguments.

    It runs the same operations in the same order on the same weights, so the results are bitwise identical.

    Attributes:
        checked: whether a result was compared with the model's.
    """

    def __init__(self, run: Callable[..., Tensor], weights: list[tuple[dict, str, Tensor | None]]) -> None:
        self._run = run
        self._weights = weights
        self.checked = False

    @property
    def current(self) -> bool:
        """Whether the model still has the recorded tensors; they may have changed in place."""
        return all([of.get(name) is weight for of, name, weight in self._weights])

    def __call__(self, attend: AttentionOverride, *inputs: Tensor | None) -> Tensor:
        return self._run(attend, *inputs)


def record(model: CachedModel, inputs: PassInputs) -> Recorded | None:
    """Records a pass; None if it uses tensors that are neither inputs nor weights.

    Args:
        model: a model of megatron-core's own modules, without communication.
        inputs: the inputs of a pass; their shapes are recorded.
    """
    weights = list[tuple[dict, str, Tensor | None]]()
    for module in model.model.modules():
        for of in (module._parameters, module._buffers):
            weights += [(of, name, weight) for name, weight in of.items()]
    mark = partial(model, lambda core, q, k, v: _attend(q, k, v, core.layer_number - 1))
    # megatron-core replaces views by setting the data of new tensors, which a recording does not see.
    with mock.patch.object(megatron.core.utils, "_kernel_make_viewless_tensor", lambda x, *_: x):
        graph = make_fx(mark, pre_dispatch=True)(*inputs)
    constants = [getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"]
    if not {*map(id, constants)} <= {id(weight) for *_, weight in weights}:
        return None

    def attend_layer(attend: AttentionOverride, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        recorder.at_layer(layer + 1)
        return attend(model.cores[layer], q, k, v)

    with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
        attend = graph.graph.placeholder("attend")
    for node in graph.graph.nodes:
        if node.target is _attend:
            node.target = attend_layer
            node.args = (attend, *node.args)
    _shorten(graph.graph)
    graph.recompile()
    graph.__dict__ |= graph._parameters  # found before nn.Module.__getattr__
    return Recorded(graph.forward, weights)


def _shorten(graph: fx.Graph) -> None:
    """Removes operations that return their input, and rotations that each layer recomputes from the inputs.

    PyTorch's functions replace its operators, because they are faster to call.
    """
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:  # nothing here has a gradient
            graph.erase_node(node)
        elif (same := _same(node)) is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    known: dict[fx.Node | tuple, fx.Node] = {node: node for node in graph.nodes if node.op == "placeholder"}
    for node in graph.nodes:
        of = (node.target, *node.args, *node.kwargs.items())
        if node.target in _PURE and any(x in known for x in node.args if isinstance(x, fx.Node)):
            if of in known:
                node.replace_all_uses_with(known[of])
            else:
                known[of] = known[node] = node
        elif node.target is _ops.matmul.default and getattr(node.args[1], "target", None) is _ops.t.default:
            node.target, node.args = F.linear, (node.args[0], node.args[1].args[0])
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
            name = node.target._schema.name.removeprefix("aten::")
            found = (getattr(of, name, None) for of in (torch, torch.Tensor, torch._C._nn))
            node.target = next(filter(None, found), node.target)


_ops = torch.ops.aten
_PURE = {_ops.cos.default, _ops.sin.default, _ops.mul.Tensor}  # their results are never modified in place


def _same(node: fx.Node) -> fx.Node | None:
    """The input that an operation returns unchanged; None for views, which may have other strides."""
    args: Any = node.args
    match node.target:
        case _ops.alias.default:
            return args[0]
        case _ops.view_as.default if node.meta["val"].stride() == args[0].meta["val"].stride():
            return args[0]
        case _ops.mul.Tensor if args[1] == 1.0 and node.meta["val"].dtype == args[0].meta["val"].dtype:
            return args[0]
        case _ops.dropout.default | _ops.dropout_.default if not args[2]:
            return args[0]
        case _ops.to.dtype if node.meta["val"].dtype == args[0].meta["val"].dtype:
            return args[0]
        case _ops.cat.default:
            parts = [part for part in args[0] if part.meta["val"].numel()]
            return parts[0] if len(parts) == 1 else None
    return None
