"""On a host without a GPU: the shards of FSDP2 with `--optimizer-cpu-offload` are on the host, all else on a device.

While our code handles shards (it scales gradients, updates, saves and loads), no operation may take tensors of both,
and no communication one of the host. PyTorch's own FSDP2 is not watched.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.context_parallel.trainer.checkpoint import save_load, train_state
from megatron.context_parallel.trainer.faults.findings import Findings
from megatron.context_parallel.trainer.model import torch_fsdp2
from megatron.context_parallel.trainer.model.shard_optimizer import HostOptimizer
from tests.support import zero_case

OFFLOADED = {"optimizer_cpu_offload": True}
DEVICE = torch.device("cpu", 0)  # of tensors that are moved to the device; others have no number


class Places(TorchDispatchMode):
    """Refuses operations that a GPU would refuse, by the storages that are on the host."""

    def __init__(self, on_host: list[torch.Tensor]) -> None:
        super().__init__()
        self.on_host = {id_of(tensor): tensor for tensor in on_host}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # it calls the same for the shards
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        places = {id_of(x) in self.on_host for x in tensors if x.numel()}
        assert "c10d" not in func.namespace or True not in places, f"{func} takes a tensor of the host"
        moves = func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
        assert moves or len(places) < 2, f"{func} takes tensors of the host and of the device"
        found = func(*args, **kwargs)
        if True in places and func is not torch.ops.aten.copy_.default and kwargs.get("device") is None:
            self.on_host |= {id_of(x): x for x in tree_leaves(found) if isinstance(x, torch.Tensor)}
        return found


def id_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def shards_on_host() -> Iterator[list[type]]:
    """Watches runs inside. Gives the policies with which FSDP2 was called."""
    policies: list[type] = []
    weights: list[torch.nn.Parameter] = []
    states: list[torch.Tensor] = []
    fully_shard = torch_fsdp2.fully_shard

    def shard(module, **how):
        policies.append(type(how["offload_policy"]))
        sharded = fully_shard(module, **how)
        weights.extend(module.parameters())
        return sharded

    def watched(call: Callable) -> Callable:
        @wraps(call)
        def run(*args, **named):
            if isinstance(args[0], HostOptimizer):
                states.extend(x for state in args[0].optimizer.state.values() for x in state.values())
            shards = [x for one in weights for x in (one.detach(), one.grad) if x is not None] + states
            with Places([x.to_local() if isinstance(x, DTensor) else x for x in shards]):
                return call(*args, **named)

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_fsdp2, "fully_shard", shard)
        patch.setattr(torch.cuda, "current_device", lambda: DEVICE)
        for owner, names in (
            (torch_fsdp2.TorchFSDP2, ["scale_gradients"]),
            (HostOptimizer, ["step"]),
            (Findings, ["look"]),
            (train_state, ["sharded_weights", "sharded_optimizer"]),
            (save_load, ["load_weights", "load_optimizer"]),
        ):
            for name in names:
                patch.setattr(owner, name, watched(getattr(owner, name)))
        yield policies


def train(changes: dict) -> tuple[list[float], list[float], bool]:
    """Losses and gradient norms of a watched run of FSDP2, and whether it keeps all shards on the host."""
    with shards_on_host() as policies:
        losses, norms = zero_case.train("gpt3", zero_case.WAYS["torch_fsdp2"] | OFFLOADED | changes)
    return losses, norms, {*policies} == {CPUOffloadPolicy}
