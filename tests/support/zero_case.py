"""Kinds of sharding of optimizer, gradients and weights over data and context ranks, and runs that use them."""

from unittest import mock

import torch
from megatron.core import optimizer
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import distrib_optimizer as distrib
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron.context_parallel.trainer.checkpoint.train_state import sharded_state
from megatron.context_parallel.trainer.config.workload import model_of
from megatron.context_parallel.trainer.model import torch_fsdp2
from tests.support import training_case

PLAIN = {"use_distributed_optimizer": False}
INSTANCES = {"num_distributed_optimizer_instances": 2}
MESH = {"cp_strategy": "mesh", "cp_layout": "cyclic"}
IN_CHUNKS = {"cross_entropy_chunk_size": 6, "mlp_chunks_for_training": 3}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
KEPT = FULL | {"recompute_whitelist": ["core_attention", "qkv", "proj", "norms"]}


def fsdp(sharding: str, **changes) -> dict:
    return {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": sharding, **changes}


WAYS = {
    "plain": PLAIN,
    "distributed optimizer": {},
    "distributed optimizer, 2 instances": INSTANCES,
    "optim": fsdp("optim"),
    "optim_grads": fsdp("optim_grads"),
    "optim_grads, 2 instances": fsdp("optim_grads") | INSTANCES,
    "optim_grads_params": fsdp("optim_grads_params"),
    "optim_grads_params, 2 instances": fsdp("optim_grads_params") | INSTANCES,
    "torch_fsdp2": PLAIN | {"use_torch_fsdp2": True},
    "torch_fsdp2, on the host": PLAIN | {"use_torch_fsdp2": True, "optimizer_cpu_offload": True},
}


def train(family: str, changes: dict) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a run with two micro batches on each of two data ranks."""
    run = training_case.train(family, context_parallel_size=2, global_batch_size=8, **changes)
    return run.losses, run.grad_norms


def train_with_few_rows() -> tuple[list[float], list[float], int]:
    """Losses and norms of FSDP2 with more ranks than sinks have rows, and the smallest tensor in a kernel for many."""
    smallest, apply = [], clip_grads.multi_tensor_applier

    def applied(op, flag, lists, *how):
        smallest.extend(min(x.numel() for x in tensors) for tensors in lists)
        return apply(op, flag, lists, *how)

    with mock.patch.object(clip_grads, "multi_tensor_applier", applied):
        run = training_case.train("sinks", global_batch_size=12, train_iters=3, **WAYS["torch_fsdp2"])
    return run.losses, run.grad_norms, min(smallest)


def train_with_all_rows() -> tuple[list[float], list[float]]:
    """The same with whole weights."""
    run = training_case.train("sinks", global_batch_size=12, train_iters=3, **PLAIN)
    return run.losses, run.grad_norms


class AdamOfWholeWeights(torch.optim.Optimizer):
    """Transformer Engine's FusedAdam, which until 2.13 makes moments in the shape of the whole weight."""

    def __init__(self, params, lr, betas, eps, weight_decay, *, adam_w_mode, capturable=False):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure=None):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        assert not any(isinstance(weight, DTensor) for weight in weights), "moments of whole weights on each rank"


class AdamThatCountsInGroups(torch.optim.Optimizer):
    """AdamW that counts steps in its groups, from the first one on: Transformer Engine's and Apex's FusedAdam."""

    def __init__(self, params, lr, betas, eps, weight_decay, **how):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            first, second = group["betas"]
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                for name in () if state else ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(weight)
                mean = state["exp_avg"].lerp_(weight.grad, 1 - first) / (1 - first**step)
                square = state["exp_avg_sq"].lerp_(weight.grad.square(), 1 - second) / (1 - second**step)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


def train_with_counts_in_groups(changes: dict) -> list[float]:
    """Losses of a run where megatron-core's Adam is not PyTorch's."""
    adam = {"Adam": AdamThatCountsInGroups}
    with mock.patch.multiple(optimizer, USING_PYTORCH_OPTIMIZER=False, **adam), mock.patch.multiple(distrib, **adam):
        return training_case.train("llama", context_parallel_size=1, train_iters=4, **changes).losses


def train_beside_another_adam() -> tuple[list[float], list[float]]:
    """FSDP2 where megatron-core's Adam is not PyTorch's."""
    with mock.patch.multiple(optimizer, Adam=AdamOfWholeWeights, USING_PYTORCH_OPTIMIZER=False):
        run = training_case.train("sinks", global_batch_size=12, train_iters=3, **WAYS["torch_fsdp2"])
    return run.losses, run.grad_norms


def whole_when_sharding() -> list[int]:
    """Parameters of the parts built so far that are whole, whenever FSDP2 shards a part of a model of two layers."""
    found, parts = [], []

    def shard(part, **how):
        parts.append(part)
        weights = {id(weight): weight for one in parts for weight in one.parameters()}
        found.append(sum(weight.numel() for weight in weights.values() if not isinstance(weight, DTensor)))
        return fully_shard(part, **how)

    args = training_case.case_args("llama", bf16=True, params_dtype=torch.bfloat16, **WAYS["torch_fsdp2"])
    with training_case.groups(args), mock.patch.object(torch_fsdp2, "fully_shard", shard):
        training_case.build(args)
    return found


def bytes_to_save(way: str) -> tuple[int, int, int]:
    """Bytes that a rank has of a checkpoint's optimizer states, of all of them, and of those of the largest weight.

    With FSDP, weights count too.
    """
    args = training_case.case_args("gpt3", context_parallel_size=2, **WAYS[way])
    with training_case.groups(args):
        saved = sharded_state(training_case.build(args), optimizer=True, generators=False)
    states = saved["optimizer"].get("param_state", {})
    assert not any(isinstance(entry, dict) for entry in states.values())  # other dicts on other ranks
    sharded = args.use_megatron_fsdp or args.use_torch_fsdp2
    entries = [*(nested_values(saved["model0"]) if sharded else ()), *states.values()]
    mine = sum(entry.data.nbytes for entry in entries if torch.is_tensor(entry.data))
    shape, tensors = model_of(args), 4 if sharded else 3
    return mine, 4 * tensors * shape.parameters, 4 * tensors * shape.largest_weight()
