"""Ways to share out optimizer, gradients and weights among data and context ranks, and how each trains."""

import training_case

PLAIN = {"use_distributed_optimizer": False}
INSTANCES = {"num_distributed_optimizer_instances": 2}


def fsdp(sharding: str, **changes) -> dict:
    return {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": sharding, **changes}


WAYS = {
    "distributed optimizer": {},
    "distributed optimizer, 2 instances": INSTANCES,
    "optim": fsdp("optim"),
    "optim_grads": fsdp("optim_grads"),
    "optim_grads_params": fsdp("optim_grads_params"),
    "optim_grads_params, 2 instances": fsdp("optim_grads_params") | INSTANCES,
    "torch_fsdp2": {"use_torch_fsdp2": True, "use_distributed_optimizer": False},
}
