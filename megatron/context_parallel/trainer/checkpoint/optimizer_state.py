"""The optimizer in a checkpoint: whole tensors for each weight, in the same format for every kind of sharding."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron.context_parallel.patches.megatron_offloaded_optimizer import prime_offloaded
from megatron.context_parallel.trainer.model.data_parallel import DataParallel

from .sharded_weights import described
from .tensor_owners import Shard, Shares, copy_shares, shard_of, shares_of, whole_tensors

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
_KINDS = ("param", "exp_avg", "exp_avg_sq")
# Of a group of parameters; the schedule sets lr and weight decay.
_FROM_FLAGS = ("max_lr", "min_lr", "betas", "eps", "default_config", "lr", "weight_decay")


def sharded_optimizer(optimizer: MegatronOptimizer, model: list[DataParallel], loading: bool) -> dict[str, Any]:
    """The optimizer's state dict for megatron-core's dist_checkpointing, to save or to load. Every rank calls this."""
    parts = _parts(optimizer)
    for part in parts:
        _prime_adam(part)
    states = {}
    weights = _weights_with_states(parts, model)
    for kind in _KINDS:
        wholes = whole_tensors([weight.shard(kind) for weight in weights], torch.float32, loading)
        for weight, whole in zip(weights, wholes, strict=True):
            if whole is not None:  # no dict for each weight: megatron-core warns if ranks have other dicts
                states[f"{weight.name}.{kind}"] = _entry(weight, kind, whole)
    step = max(_step(part) for part in parts)
    groups = []
    for part in parts:
        groups += [_plain(part, group) | {"step": step} for group in part.optimizer.param_groups]
    sharding = METADATA["distrib_optim_sharding_type"]
    sharded: dict[str, Any] = {"optimizer": {"param_groups": groups}, "param_state_sharding_type": sharding}
    if states:  # nor an empty one
        sharded["param_state"] = states
    if scaler := getattr(parts[0], "grad_scaler", None):
        # On the host: megatron-core sends it to all ranks, which would each take memory of the sender's GPU.
        saved = scaler.state_dict()
        sharded["grad_scaler"] = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in saved.items()}
    return sharded


def load_optimizer(optimizer: MegatronOptimizer, model: list[DataParallel], loaded: dict[str, Any]) -> None:
    """Restore the optimizer from a loaded state dict. Values that flags set stay as the flags of this run set them."""
    parts = _parts(optimizer)
    weights = _weights_with_states(parts, model)
    for kind in _KINDS:
        wholes = [loaded.get("param_state", {}).get(f"{weight.name}.{kind}") for weight in weights]
        copy_shares([weight.shard(kind) for weight in weights], wholes, torch.float32)
    step = loaded["optimizer"]["param_groups"][0]["step"]
    for part in parts:
        _set_step(part, step)
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            _copy_to_device(part.optimizer)
        if getattr(part, "grad_scaler", None) and loaded.get("grad_scaler"):  # a constant scale has no state
            part.grad_scaler.load_state_dict(loaded["grad_scaler"])


# ------------------------------------------------------------------------------------------------ states of weights


class _Weight(NamedTuple):
    """A weight: its name in `param_state`, its entry in checkpoints, this rank's share of its states, and its shares.

    `shares` is None if each rank has the whole states.
    """

    name: str
    entry: ShardedBase
    parameter: torch.nn.Parameter
    states: dict[str, Tensor]
    shares: Shares | None

    def shard(self, kind: str) -> Shard:
        """The shard of one kind of state: "param" is the float32 copy of the weight, or the weight itself."""
        return shard_of(self.states[kind], self.entry, self.parameter.shape, self.shares)


def _weights_with_states(parts: list[MegatronOptimizer], model: list[DataParallel]) -> list[_Weight]:
    """All weights that the optimizer updates. All ranks call it."""
    in_buckets = isinstance(parts[0], DistributedOptimizer) and isinstance(model[0], DistributedDataParallel)
    weights = []
    for number, chunk in enumerate(model):
        for name, entry, parameter, shares in described(chunk):
            states = {} if in_buckets else _states_of_weight(parts, parameter)
            weights.append(_Weight(f"{number}.{name}", entry, parameter, states, shares))
    return _shared_in_buckets(parts, weights) if in_buckets else weights


def _states_of_weight(parts: list[MegatronOptimizer], parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    """The optimizer's states of a weight; with FSDP, of this rank's rows."""
    main = getattr(parameter, "main_param", parameter)
    part = next(part for part in parts if main in part.optimizer.state)
    return _states_of(part, main)


def _states_of(part: MegatronOptimizer, main: Tensor) -> dict[str, Tensor]:
    """The states of what the optimizer updates: a weight, its float32 copy, or numbers of either."""
    state = part.optimizer.state[main]
    copy = state.get("master_param", main)  # of an optimizer in host memory
    return {"param": copy, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def _shared_in_buckets(parts: list[DistributedOptimizer], weights: list[_Weight]) -> list[_Weight]:
    """The same weights with their states. megatron-core's distributed optimizer shards buckets of many weights."""
    groups: dict[torch.nn.Parameter, dist.ProcessGroup] = {}
    states: dict[torch.nn.Parameter, dict[str, Tensor]] = {}
    for part in parts:
        for buffer in part.buffers:
            groups |= dict.fromkeys(buffer.param_index_map, part.data_parallel_group)
        for parameter, main in _numbers_in_buckets(part).items():
            states[parameter] = _states_of(part, main)
    nothing = dict.fromkeys(_KINDS, torch.empty(0, device=torch.cuda.current_device()))
    found = [weight._replace(states=states.get(weight.parameter, nothing)) for weight in weights]
    shares = shares_of([(groups[weight.parameter], weight.states["param"].numel()) for weight in found])
    return [weight._replace(shares=of_weight) for weight, of_weight in zip(found, shares, strict=True)]


def _numbers_in_buckets(part: DistributedOptimizer) -> dict[torch.nn.Parameter, Tensor]:
    """This rank's numbers of each weight of which it has some: what the optimizer updates."""
    found: dict[torch.nn.Parameter, Tensor] = {}
    for weights, updated in zip(part.model_fp32_groups, part.shard_fp32_groups, strict=True):
        found |= dict(zip(weights, updated, strict=True))
    halves = zip(part.model_float16_groups, part.shard_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
    for weights, numbers, copies in halves:
        for weight, own, copy in zip(weights, numbers, copies, strict=True):
            found[weight] = own if copy is None else copy  # None if the optimizer itself has it
    return found


def _entry(weight: _Weight, kind: str, whole: Tensor) -> ShardedBase:
    """The entry of a state in checkpoints."""
    changes: dict[str, Any] = {"key": f"optimizer.state.{kind}.{weight.entry.key}", "data": whole}
    if isinstance(weight.entry, ShardedTensor):
        changes["dtype"] = torch.float32
    return weight.shares.owned(weight.entry, **changes) if weight.shares else replace(weight.entry, **changes)


# ------------------------------------------------------------------------------------------------ kinds of optimizers


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers of megatron-core: one, or another one for sharded experts."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _adams(part: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """What updates: several with an optimizer in host memory."""
    adam = part.optimizer
    return adam.sub_optimizers if isinstance(adam, HybridDeviceOptimizer) else [adam]


def _prime_adam(part: MegatronOptimizer) -> None:
    """Give every weight states, if there are none yet. PyTorch's Adam creates them at the first step."""
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        prime_offloaded(part.optimizer)
        return
    part.init_state_fn(part.optimizer, part.config)
    if isinstance(part.optimizer, torch.optim.Adam):
        for state, step in with_steps(part.optimizer, 0.0):
            state.setdefault("step", step)


def _step(part: MegatronOptimizer) -> float:
    """The number of updates so far. A rank without rows of a weight does not count the updates of that weight."""
    steps = [0.0]
    for adam in _adams(part):
        counts = [state["step"] for state in adam.state.values() if "step" in state]
        steps += [torch.stack(counts).max().item()] if counts else []  # a GPU is waited for once
        steps += [group.get("step", 0) for group in adam.param_groups]
    return max(steps)


def _set_step(part: MegatronOptimizer, step: float) -> None:
    for adam in _adams(part):
        if not isinstance(adam, torch.optim.Adam):  # Transformer Engine's and Apex's count in groups
            for group in adam.param_groups:
                group["step"] = int(step)
            continue
        for state, own in with_steps(adam, step):
            state["step"] = own


def with_steps(adam: torch.optim.Adam, step: float) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """The state of each weight of PyTorch's Adam, and a tensor with its step count, where its kernel reads that."""
    for group in adam.param_groups:
        on_device = group["fused"] or group["capturable"]
        for updated in group["params"]:
            yield adam.state[updated], torch.full((), float(step), device=updated.device if on_device else "cpu")


def _copy_to_device(adam: HybridDeviceOptimizer) -> None:
    """Copy the weights that an optimizer in host memory has there to the device."""
    for numbers, state in adam.state.items():
        numbers.data.copy_(state["master_param"])


def _plain(part: MegatronOptimizer, group: dict[str, Any]) -> dict[str, Any]:
    """A group of parameters without the parameters, and without what only an optimizer in host memory has."""
    left_out = {"params"}
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        left_out |= {*part.optimizer.defaults} - {*_FROM_FLAGS}
    return {name: value for name, value in group.items() if name not in left_out}
