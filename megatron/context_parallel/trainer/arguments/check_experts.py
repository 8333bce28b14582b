"""Rejects flags that do not work with experts, or whose results were not compared with one rank."""

import math
from collections.abc import Iterator

from megatron.context_parallel.cli.flag_checks import flag_text, refusal
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.config.flags import Arguments

from .check_sharding import check_sharers


def check_experts(args: Arguments) -> Iterator[UsageError]:
    """The errors about flags that cannot be combined with `--num-experts`."""
    if not args.num_experts:
        return
    experts = f"--num-experts {args.num_experts}"
    if args.moe_router_topk == 1 and not args.moe_router_pre_softmax:
        yield refusal(args, "moe_router_topk", "the softmax of one score is always 1", moe_router_pre_softmax=True)
    if args.add_bias_linear and args.tensor_model_parallel_size > 1:
        why = "experts with biases are not split; give --disable-bias-linear, or one tensor-parallel rank"
        yield refusal(args, "tensor_model_parallel_size", why)
    if args.add_bias_linear and args.moe_shared_expert_intermediate_size:
        why = "megatron-core's shared experts have no biases; give --disable-bias-linear, or leave it out"
        yield refusal(args, "moe_shared_expert_intermediate_size", why)
    if args.transformer_impl != "local":
        yield refusal(args, "transformer_impl", f"was not tested with {experts}", transformer_impl="local")
    if not args.cp_layers:
        yield refusal(args, "cp_strategy", f"its time model does not support {experts}", cp_strategy="ring")
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        why = f"needs --sequence-parallel with {experts}"
        yield refusal(args, "tensor_model_parallel_size", why, sequence_parallel=True)
    yield from _check_expert_ranks(args)


def _check_expert_ranks(args: Arguments) -> Iterator[UsageError]:
    name = "expert_model_parallel_size"
    size = args.expert_model_parallel_size
    yield from check_sharers(args, name)
    yield from _check_instances(args)
    if size > 1 and args.tensor_model_parallel_size > 1:
        why = "was not tested with tensor parallelism"
        yield refusal(args, name, why, expert_model_parallel_size=1)
    if size > 1 and (args.use_megatron_fsdp or args.use_torch_fsdp2):
        yield refusal(args, name, "was not tested with FSDP", expert_model_parallel_size=1)


def _check_instances(args: Arguments) -> Iterator[UsageError]:
    """The error if the ranks that share an expert cannot be split into the instances of the optimizer."""
    name = "num_distributed_optimizer_instances"
    instances = args.num_distributed_optimizer_instances
    each, rest = divmod(args.data_parallel_size * args.context_parallel_size, args.expert_model_parallel_size)
    if not rest and each % instances:
        experts = flag_text(args, "expert_model_parallel_size")
        yield refusal(
            args,
            name,
            f"does not divide {each}, the ranks of an expert with {experts}",
            **{name: math.gcd(each, instances)},
        )
