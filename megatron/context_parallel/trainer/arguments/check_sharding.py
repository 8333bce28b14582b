"""Refuses ways to share out optimizer, gradients and weights that megatron-core 0.16.1 gets wrong, or has not."""

import math
import os

from megatron.context_parallel.cli.flag_checks import refuse
from megatron.context_parallel.trainer.config.flags import Arguments


def check_sharding(args: Arguments) -> None:
    """Refuse flags of data-parallel sharding that do not go together.

    Raises:
        UsageError: one line that names one of the flags, its value and a value that fits.
    """
    _check_instances(args)
    if args.use_megatron_fsdp:
        _check_megatron_fsdp(args)
    if args.use_megatron_fsdp or args.use_torch_fsdp2:
        _check_fsdp(args, "use_megatron_fsdp" if args.use_megatron_fsdp else "use_torch_fsdp2")


def check_sharers(args: Arguments, name: str) -> None:
    """Refuse a value of field `name` that does not divide the data x context ranks."""
    value = getattr(args, name)
    sharers = args.data_parallel_size * args.context_parallel_size
    if sharers % value:
        refuse(args, name, f"does not divide the {sharers} data x context ranks", **{name: math.gcd(sharers, value)})


def _check_instances(args: Arguments) -> None:
    name = "num_distributed_optimizer_instances"
    instances = args.num_distributed_optimizer_instances
    check_sharers(args, name)
    if instances > 1 and not args.use_distributed_optimizer:
        refuse(args, name, "needs a sharded optimizer", use_distributed_optimizer=True)
    if instances > 1 and args.data_parallel_sharding_strategy == "optim":
        why = "Megatron-FSDP makes wrong gradients of several instances that share out the optimizer alone"
        refuse(args, name, why, data_parallel_sharding_strategy="optim_grads")


def _check_megatron_fsdp(args: Arguments) -> None:
    sharding, tensor = args.data_parallel_sharding_strategy, args.tensor_model_parallel_size
    if sharding == "no_shard":
        why = "Megatron-FSDP fails without a --data-parallel-sharding-strategy"
        refuse(args, "use_megatron_fsdp", why, data_parallel_sharding_strategy="optim_grads_params")
    if args.outer_dp_sharding_strategy != "no_shard":
        why = "the gradient norm of Megatron-FSDP is wrong with it"
        refuse(args, "outer_dp_sharding_strategy", why, outer_dp_sharding_strategy="no_shard")
    if sharding == "optim" and args.overlap_grad_reduce:
        why = "the gradients of Megatron-FSDP are wrong with --data-parallel-sharding-strategy optim"
        refuse(args, "overlap_grad_reduce", why, data_parallel_sharding_strategy="optim_grads")
    if tensor > 1:
        why = "not supported with --use-megatron-fsdp; --use-torch-fsdp2 and --use-distributed-optimizer work"
        refuse(args, "tensor_model_parallel_size", why, tensor_model_parallel_size=1)


def _check_fsdp(args: Arguments, which: str) -> None:
    if args.pipeline_model_parallel_size > 1:
        why = "a pipeline is not supported with FSDP; --use-distributed-optimizer works"
        refuse(args, which, why, pipeline_model_parallel_size=1)
    if args.fp8:
        refuse(args, "fp8", "not supported with FSDP; leave one of the two out")
    if args.fp16:
        refuse(args, "fp16", "not supported with FSDP", bf16=True)
    if args.rerun_mode != "disabled":
        why = "FSDP keeps no gradients of a rank's own, by which a faulty device is found"
        refuse(args, "rerun_mode", why, rerun_mode="disabled")
    import torch

    if torch.cuda.is_available() and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        refuse(args, which, "CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment makes FSDP wait for itself; unset it")
