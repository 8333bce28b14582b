"""The optimizer in a checkpoint: whole tensors for each weight, in the same format for every kind of sharding."""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron.context_parallel.patches.megatron_offloaded_optimizer import prime_offloaded
from megatron.context_parallel.trainer.model.data_parallel import DataParallel

from .sharded_weights import RowSharding, copy_share, described, whole_tensor

METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
# Of a group of parameters; the schedule sets lr and weight decay.
_FROM_FLAGS = ("max_lr", "min_lr", "betas", "eps", "default_config")


def sharded_optimizer(
    optimizer: MegatronOptimizer, model: list[DataParallel], weights: dict[str, Any], loading: bool
) -> dict[str, Any]:
    """The optimizer's state dict for megatron-core's dist_checkpointing, to save or to load. Every rank calls this.

    `weights` is the state dict of the model chunks.
    """
    _prime_adam(optimizer)
    if _has_buckets(optimizer, model):
        _count_bucket_padding(model)
        given = _values_of_flags(optimizer)
        sharded = _sharded_buckets(optimizer, weights, loading)
        _give_back(optimizer, given)  # to load, megatron-core mixes up the groups of --decoupled-lr and others
        return sharded
    parts = _parts(optimizer)
    groups = []
    for part in parts:
        groups += [_without_parameters(group) | {"step": _step(part)} for group in part.optimizer.param_groups]
    states = {}
    for number, chunk in enumerate(model):
        for name, entry, parameter, rows in described(chunk):
            for kind, tensor in _states(parts, parameter).items():
                sharded_state = _sharded_state(entry, kind, tensor, rows, loading)
                if sharded_state:  # no dict for each weight: megatron-core warns if ranks have other dicts
                    states[f"{number}.{name}.{kind}"] = sharded_state
    kind = METADATA["distrib_optim_sharding_type"]
    sharded = {"optimizer": {"param_groups": groups}, "param_state": states, "param_state_sharding_type": kind}
    if scaler := getattr(parts[0], "grad_scaler", None):
        sharded["grad_scaler"] = scaler.state_dict()
    return sharded


def load_optimizer(optimizer: MegatronOptimizer, model: list[DataParallel], loaded: dict[str, Any]) -> None:
    """Restore the optimizer from a loaded state dict. Values that flags set stay as the flags of this run set them."""
    if not loaded.get("grad_scaler"):  # a constant scale has no state: a dynamic one starts as flags say
        loaded = {name: value for name, value in loaded.items() if name != "grad_scaler"}
    if _has_buckets(optimizer, model):
        _load_buckets(optimizer, loaded)
        return
    parts = _parts(optimizer)
    for number, chunk in enumerate(model):
        for name, _, parameter, rows in described(chunk):
            for kind, tensor in _states(parts, parameter).items():
                copy_share(tensor, loaded["param_state"].get(f"{number}.{name}.{kind}"), rows)
    step = loaded["optimizer"]["param_groups"][0]["step"]
    for part in parts:
        for state in part.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.tensor(float(step))
        for group in part.optimizer.param_groups:
            if "step" in group:  # Transformer Engine's and Apex's Adam count steps here
                group["step"] = int(step)
        if getattr(part, "grad_scaler", None) and "grad_scaler" in loaded:
            part.grad_scaler.load_state_dict(loaded["grad_scaler"])


# --------------------------------------------------------------------------------- weights with a state of their own


def _has_buckets(optimizer: MegatronOptimizer, model: list[DataParallel]) -> bool:
    """Whether it is megatron-core's distributed optimizer on DDP, which shards buckets of many weights."""
    return isinstance(_parts(optimizer)[0], DistributedOptimizer) and isinstance(model[0], DistributedDataParallel)


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _states(parts: list[MegatronOptimizer], parameter: torch.nn.Parameter) -> dict[str, Tensor]:
    """The optimizer's state of a weight, and its float32 copy; with FSDP, this rank's rows."""
    main = getattr(parameter, "main_param", parameter)
    state = next(part.optimizer.state[main] for part in parts if main in part.optimizer.state)
    return {"param": main, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def _sharded_state(
    entry: ShardedBase, kind: str, tensor: Tensor, rows: RowSharding | None, loading: bool
) -> ShardedBase | None:
    """The state of a weight whose entry in checkpoints is `entry`; None if another rank owns it."""
    whole = whole_tensor(tensor, rows, torch.float32, loading)
    if whole is None:
        return None
    changes: dict[str, Any] = {"key": f"optimizer.state.{kind}.{entry.key}", "data": whole}
    if isinstance(entry, ShardedTensor):
        changes["dtype"] = torch.float32
    return rows.owned(entry, **changes) if rows else replace(entry, **changes)


def _step(part: MegatronOptimizer) -> float:
    """The number of updates so far. A rank without rows of a weight does not count the updates of that weight."""
    states = [state["step"].item() for state in part.optimizer.state.values() if "step" in state]
    return max(states + [group.get("step", 0) for group in part.optimizer.param_groups])


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


# ------------------------------------------------------------------------------------------------------- buckets


def _sharded_buckets(optimizer: MegatronOptimizer, weights: dict[str, Any], loading: bool) -> dict[str, Any]:
    """The state of one optimizer, even if sharded experts have a separate optimizer."""
    parts = []
    for part in _parts(optimizer):
        sharded = part.sharded_state_dict(weights, is_loading=loading, metadata=METADATA)
        for group, name in product(sharded["optimizer"]["param_groups"], _settings_of_offloading(part)):
            group.pop(name, None)
        parts.append(sharded)
    if len(parts) == 1:
        return parts[0]
    groups = [group for part in parts for group in part["optimizer"]["param_groups"]]
    states = {number: part["param_state"] for number, part in enumerate(parts)}
    return {**parts[0], "optimizer": {**parts[0]["optimizer"], "param_groups": groups}, "param_state": states}


def _count_bucket_padding(model: list[DataParallel]) -> None:
    # megatron-core gathers the optimizer's buckets without the padding between them, then slices parameters at
    # offsets that include it. Values after a padded bucket are wrong. Gathering the padding too makes them right.
    for buffer in (buffer for chunk in model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)):
        for bucket in buffer.buckets:
            bucket.numel_unpadded = bucket.grad_data.numel()
        buffer.numel_unpadded = buffer.numel


def _prime_adam(optimizer: MegatronOptimizer) -> None:
    # PyTorch's Adam creates its step counts at the first step. megatron-core reads them before that.
    for part in _parts(optimizer):
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            prime_offloaded(part.optimizer)
            continue
        part.init_state_fn(part.optimizer, part.config)
        for parameter_state in part.optimizer.state.values() if _is_torchs(part) else ():
            parameter_state.setdefault("step", torch.tensor(0.0))


def _settings_of_offloading(part: MegatronOptimizer) -> set[str]:
    """The entries of a group of parameters that only an offloaded optimizer has."""
    adam = part.optimizer
    return {*adam.defaults} - {*_FROM_FLAGS, "lr", "weight_decay"} if isinstance(adam, HybridDeviceOptimizer) else set()


def _load_buckets(optimizer: MegatronOptimizer, loaded: dict[str, Any]) -> None:
    parts = _parts(optimizer)
    given = _values_of_flags(optimizer)
    both = []
    # Saved without sharded experts: their optimizer has the parameter groups of the other weights.
    for shared in (False, True):
        # megatron-core 0.19 also compares the learning rates of groups, so each saved group gets those of now.
        for now, group in product(given, loaded["optimizer"]["param_groups"]):
            both.append(group | now | {"is_expert_parallel": shared})
    for number, part in enumerate(parts):
        states = loaded["param_state"] if len(parts) == 1 else loaded["param_state"][number]
        copied = [dict(group) for group in both]
        _load_part(part, {**loaded, "optimizer": {**loaded["optimizer"], "param_groups": copied}}, states)
    _give_back(optimizer, given)  # megatron-core until 0.18 restored the saved values, and the schedule would use them


def _values_of_flags(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """What flags set in each group of parameters."""
    names = {*_FROM_FLAGS, *_settings_of_offloading(_parts(optimizer)[0])}
    given = []
    for group in optimizer.param_groups:
        given.append({name: value for name, value in group.items() if name in names})
    return given


def _give_back(optimizer: MegatronOptimizer, given: list[dict[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, given, strict=True):
        group.update(values)


def _load_part(part: MegatronOptimizer, loaded: dict[str, Any], per_parameter: dict[int, Any]) -> None:
    if isinstance(part.optimizer, HybridDeviceOptimizer):
        _load_offloaded(part, loaded, per_parameter)
        return
    if not _is_torchs(part):
        part.load_state_dict({**loaded, "param_state": per_parameter})
        return
    part.load_state_dict({name: value for name, value in loaded.items() if name != "param_state"})
    states = part.optimizer.state.values()
    steps = [state.pop("step") for state in states]
    # megatron-core restores every entry of a state, but has no step per parameter
    part.load_parameter_state_from_fully_reshardable(per_parameter)
    for state, step in zip(states, steps, strict=True):
        state["step"] = step.clone()  # it restored one shared tensor, which every parameter would advance


def _load_offloaded(part: MegatronOptimizer, loaded: dict[str, Any], per_parameter: dict[int, Any]) -> None:
    part.load_state_dict({**loaded, "param_state": per_parameter})
    for state in part.optimizer.state.values():
        for name, tensor in state.items():
            state[name] = tensor.clone()  # it is a view of all ranks' rows, or the step of all weights
    for group in part.optimizer.param_groups:
        group.pop("step", None)  # which would set back the step of weights on the GPU in each step


def _is_torchs(part: MegatronOptimizer) -> bool:
    return isinstance(part.optimizer, torch.optim.Adam)
