"""A listing of what a model keeps for its backward pass, by the part that kept it."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from megatron.context_parallel.integration.spec import ContextParallelAttention


class Listing:
    """Bytes of storages, each counted once, by the name of the innermost module that ran when it was kept."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._names = {module: _part(name) for name, module in model.named_modules()}
        self._running: list[str] = []
        # By storage, where it is kept first. Storages stay alive, so that no address is used twice.
        self._kept: dict[int, tuple[str | None, Tensor]] = {}
        for weight in model.parameters():
            self._add(None, weight)

    @property
    def bytes(self) -> Counter[str]:
        """The sizes that the storages have now: those of some outputs are freed until the backward pass."""
        found = Counter[str]()
        for name, tensor in self._kept.values():
            if name is not None:
                found[name] += tensor.untyped_storage().nbytes()
        return found

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lists what autograd saves of the calls inside."""
        hooks = [
            register_module_forward_pre_hook(lambda module, _: self._running.append(self._names.get(module, ""))),
            register_module_forward_hook(lambda *_: self._end(), always_call=True),
        ]
        try:
            with saved_tensors_hooks(self._save, lambda kept: kept):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def add_objects(self, out: Tensor) -> None:
        """Adds what hooks do not see: queues of kept outputs, and tensors on the nodes that lead to `out`."""
        for module, name in self._names.items():
            keeper = module if isinstance(module, ContextParallelAttention) else module.forward
            for value in getattr(keeper, "kept", None) or ():
                self._add_all(name, value)
            for value in vars(module).values():
                if isinstance(value, CheckpointWithoutOutput):
                    self._add_all("random states", value.rng_states)
        for node in _nodes(out):
            self._add_all(_part(node.name()), getattr(node, "__dict__", {}))

    def _end(self) -> None:
        self._running.pop()

    def _save(self, tensor: Tensor) -> Tensor:
        self._add(self._running[-1] if self._running else "", tensor)
        return tensor

    def _add_all(self, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self._add(name, value)
        elif isinstance(value, dict):
            self._add_all(name, [*value.values()])
        elif isinstance(value, (list, tuple)):
            for one in value:
                self._add_all(name, one)

    def _add(self, name: str | None, tensor: Tensor) -> None:
        self._kept.setdefault(tensor.untyped_storage()._cdata, (name, tensor.detach()))


def _part(path: str) -> str:
    """The name of a part of the table: modules of a list have numbers, and the loss belongs to the whole model."""
    *_, owner, name = ".", *path.split(".")
    if name.isdigit():
        return "experts" if owner == "local_experts" else "layer"
    return {"module": "loss", "CheckpointFunctionBackward": "random states"}.get(name, name)


def _nodes(out: Tensor) -> list[Node]:
    """The nodes of the graph of `out`, each once."""
    found: dict[Node, None] = {}
    waiting = [out.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [before for before, _ in node.next_functions]
    return [*found]
