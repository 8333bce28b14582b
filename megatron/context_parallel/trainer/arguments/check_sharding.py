"""Rejects ways to shard optimizer, gradients and weights that megatron-core 0.16.1 gets wrong or does not support."""

import math
import os
from collections.abc import Iterator

from megatron.context_parallel.cli.flag_checks import refusal
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.config.flags import Arguments


def check_sharding(args: Arguments) -> Iterator[UsageError]:
    """The errors about flags of data-parallel sharding that cannot be combined."""
    yield from _check_instances(args)
    if args.optimizer_cpu_offload:
        yield from _check_optimizer_on_host(args)
    if args.use_megatron_fsdp:
        yield from _check_megatron_fsdp(args)
    if args.use_megatron_fsdp or args.use_torch_fsdp2:
        yield from _check_fsdp(args, "use_megatron_fsdp" if args.use_megatron_fsdp else "use_torch_fsdp2")


def check_sharers(args: Arguments, name: str) -> Iterator[UsageError]:
    """The error if the value of field `name` does not divide the number of data x context ranks."""
    value = getattr(args, name)
    sharers = args.data_parallel_size * args.context_parallel_size
    if sharers % value:
        why = f"does not divide the {sharers} data x context ranks"
        yield refusal(args, name, why, **{name: math.gcd(sharers, value)})


def _check_instances(args: Arguments) -> Iterator[UsageError]:
    name = "num_distributed_optimizer_instances"
    instances = args.num_distributed_optimizer_instances
    yield from check_sharers(args, name)
    if instances > 1 and not args.use_distributed_optimizer:
        yield refusal(args, name, "needs a sharded optimizer", use_distributed_optimizer=True)
    if instances > 1 and args.data_parallel_sharding_strategy == "optim":
        why = "Megatron-FSDP computes wrong gradients with several instances that shard only the optimizer"
        yield refusal(args, name, why, data_parallel_sharding_strategy="optim_grads")


def missing_for_optimizer_on_host(args: Arguments) -> str:
    """The flags that `--optimizer-cpu-offload` needs and that are not given; with FSDP2 it needs none."""
    if args.use_torch_fsdp2:
        return ""
    needed = [("--use-precision-aware-optimizer", args.use_precision_aware_optimizer), ("--bf16", args.bf16)]
    return " ".join(flag for flag, given in needed if not given)


def _check_optimizer_on_host(args: Arguments) -> Iterator[UsageError]:
    name = "optimizer_cpu_offload"
    if missing := missing_for_optimizer_on_host(args):
        yield refusal(args, name, f"needs {missing}, or --use-torch-fsdp2; add that or leave this out")
    if not args.use_torch_fsdp2:
        return
    if args.tensor_model_parallel_size > 1:
        why = "gradients that are on the host cannot be summed over tensor-parallel ranks"
        yield refusal(args, name, f"with --use-torch-fsdp2 {why}", tensor_model_parallel_size=1)
    for other, all_of_it in (("optimizer_offload_fraction", 1.0), ("overlap_cpu_optimizer_d2h_h2d", False)):
        if getattr(args, other) != all_of_it:
            why = (
                "not supported with --use-torch-fsdp2, which keeps all in host memory and overlaps copies; leave it out"
            )
            yield refusal(args, other, why)


def _check_megatron_fsdp(args: Arguments) -> Iterator[UsageError]:
    sharding, tensor = args.data_parallel_sharding_strategy, args.tensor_model_parallel_size
    instances = args.num_distributed_optimizer_instances
    alone = args.data_parallel_size * args.context_parallel_size == instances
    if sharding == "no_shard":
        why = "Megatron-FSDP fails without --data-parallel-sharding-strategy"
        works = "optim" if alone else "optim_grads_params"
        yield refusal(args, "use_megatron_fsdp", why, data_parallel_sharding_strategy=works)
    elif sharding != "optim" and alone:
        why = "Megatron-FSDP counts gradients more than once where one rank alone shares them"
        if instances > 1:
            yield refusal(args, "num_distributed_optimizer_instances", why, num_distributed_optimizer_instances=1)
        else:
            yield refusal(args, "data_parallel_sharding_strategy", why, data_parallel_sharding_strategy="optim")
    if args.outer_dp_sharding_strategy != "no_shard":
        why = "Megatron-FSDP computes a wrong gradient norm with it"
        yield refusal(args, "outer_dp_sharding_strategy", why, outer_dp_sharding_strategy="no_shard")
    if sharding == "optim" and args.overlap_grad_reduce:
        why = "Megatron-FSDP computes wrong gradients with --data-parallel-sharding-strategy optim; leave it out"
        yield refusal(args, "overlap_grad_reduce", why)
    if tensor > 1:
        why = "not supported with --use-megatron-fsdp; use --use-torch-fsdp2 or --use-distributed-optimizer"
        yield refusal(args, "tensor_model_parallel_size", why, tensor_model_parallel_size=1)


def _check_fsdp(args: Arguments, which: str) -> Iterator[UsageError]:
    if args.pipeline_model_parallel_size > 1:
        why = "pipeline parallelism is not supported with FSDP; use --use-distributed-optimizer"
        yield refusal(args, which, why, pipeline_model_parallel_size=1)
    if args.fp8:
        yield refusal(args, "fp8", "not supported with FSDP; leave out one of the two")
    if args.fp16:
        yield refusal(args, "fp16", "not supported with FSDP", bf16=True)
    if args.rerun_mode != "disabled":
        why = "FSDP does not keep the rank's own gradients, which are needed to find a faulty device"
        yield refusal(args, "rerun_mode", why, rerun_mode="disabled")
    import torch

    if torch.cuda.is_available() and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        why = "CUDA_DEVICE_MAX_CONNECTIONS=1 in the environment prevents FSDP from overlapping; unset it"
        yield refusal(args, which, why)
