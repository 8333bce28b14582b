"""Kinds of sharding of optimizer, gradients and weights over data and context ranks, and runs that use them."""

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
