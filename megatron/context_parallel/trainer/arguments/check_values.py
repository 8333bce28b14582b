"""Checks that values fit each other, this host and the number of ranks. No file is opened."""

import math
import os
from collections.abc import Iterator
from functools import partial
from itertools import count, product
from traceback import extract_tb
from types import SimpleNamespace
from typing import cast

from megatron.context_parallel.cli.flag_checks import refusal, refuse
from megatron.context_parallel.cli.layer_list import chosen_layers
from megatron.context_parallel.errors import UsageError, caught
from megatron.context_parallel.strategies import Choice, check_same_tokens, distinct
from megatron.context_parallel.tokens.layout import granularity
from megatron.context_parallel.trainer.config.flags import FLAGS, SPLIT, Arguments, Flags
from megatron.context_parallel.trainer.config.samples import batch_size, decay_samples, warmup_samples

from .check_experts import check_experts
from .check_recompute import check_recompute
from .check_sharding import check_sharding, missing_for_optimizer_on_host
from .cp_strategy import without_types

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def ranks_in(variable: str, default: int) -> int:
    """The integer in an environment variable.

    Raises:
        UsageError: it is not an integer.
    """
    value = os.environ.get(variable, str(default))
    if not value.isdecimal():
        why = f"not a number of ranks; start with torchrun, or unset {variable}"
        raise UsageError(f"{variable}={value} in the environment: {why}")
    return int(value)


def check_world(args: Flags, world_size: int, needed: int) -> None:
    """Reject a number of ranks that is not divisible by the parallel sizes; `needed` is their product."""
    if world_size < 1 or world_size % needed:
        sizes: dict[str, int] = {name: getattr(args, name) for name in _SIZES}
        # Name a size that does not divide the number of ranks, or else the largest.
        name = next((n for n in sizes if world_size % sizes[n]), max(sizes, key=lambda n: sizes[n]))
        product = "" if needed == sizes[name] else f" (tensor x pipeline x context = {needed})"
        fits = FLAGS[name].as_flag(math.gcd(sizes[name], max(1, world_size * sizes[name] // needed)))
        start = f"start {max(needed, world_size // needed * needed)} ranks (torchrun --nproc-per-node)"
        refuse(args, name, f"does not divide the {world_size} ranks started{product}; {start}, or give {fits}")


def check_together(args: Arguments) -> Iterator[UsageError]:
    """The errors about combinations of values that the declarations of the flags cannot express."""
    yield from _check_model(args)
    yield from check_sharding(args)
    yield from check_experts(args)
    yield from check_recompute(args)
    yield from _check_sequence(args)
    yield from _check_schedule(args)
    yield from _check_devices(args)
    yield from _check_data(args)
    yield from _check_rerun(args)
    if args.skip_train:
        yield from _check_evaluation(args)
    if args.profile:
        yield from _check_profile(args)


def _check_model(args: Arguments) -> Iterator[UsageError]:
    groups, tensor = args.num_query_groups, args.tensor_model_parallel_size
    if groups % tensor and tensor % groups:
        why = f"neither divides nor is a multiple of --tensor-model-parallel-size {tensor}"
        yield refusal(args, "num_query_groups", why, tensor_model_parallel_size=math.gcd(groups, tensor))
    yield from _check_special_layers(args)
    if args.position_embedding_type != "learned_absolute" and _rotated(args, args.kv_channels) % 2:
        wider = next(width for width in count(args.kv_channels) if _rotated(args, width) % 2 == 0)
        yield refusal(args, "kv_channels", "RoPE rotates an even number of dimensions", kv_channels=wider)
    narrow = args.cp_partials_in_16_bits or any(choice.partials_in_16_bits for choice in args.cp_layers)
    if narrow and args.params_dtype.itemsize > 2:
        yield UsageError("--cp-partials-in-16-bits: the model is float32; give --bf16, or leave it out")
    if args.attention_dropout:
        yield refusal(args, "attention_dropout", "context-parallel attention has no dropout", attention_dropout=0)


def _rotated(args: Arguments, width: int) -> int:
    """How many dimensions of a head of this width RoPE rotates."""
    return int(width * args.rotary_percent)


def _check_special_layers(args: Arguments) -> Iterator[UsageError]:
    """The errors about what only some families of models have."""
    if args.position_embedding_type == "yarn" and args.rotary_percent != 1:
        yield refusal(args, "rotary_percent", "YaRN rotates whole heads", rotary_percent=1.0)
    for name in ("sandwich_norm", "rotary_base_of_windows"):
        if getattr(args, name) and args.transformer_impl != "local":
            yield refusal(args, name, "Transformer Engine's layers have none", transformer_impl="local")
    if not args.window_attn_skip_freq:
        return
    if len(chosen_layers(args.window_attn_skip_freq, args.num_layers)) != args.num_layers:
        why = f"must have a number for each of --num-layers {args.num_layers}"
        yield refusal(args, "window_attn_skip_freq", why, window_attn_skip_freq="2")
    if not args.cp_layers and args.reset_attention_mask:
        why = "for documents it compares strategies for one window; with --window-attn-skip-freq"
        yield refusal(args, "cp_strategy", why, cp_strategy="ring")


def _check_sequence(args: Arguments) -> Iterator[UsageError]:
    if args.window_size and args.window_size[1] > 0:
        yield refusal(args, "window_size", "later tokens are not visible", window_size=(args.window_size[0], 0))
    n, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    sharers = tensor if args.sequence_parallel else 1
    what = ""
    parts = n * sharers
    if args.cp_layers:
        for choice in distinct(args.cp_layers):
            yield from (without_types(args, error) for error in caught(_check_plan, args, choice))
        yield from caught(check_same_tokens, args.cp_layers, n)
        layout = args.cp_layers[0].layout
        if args.cp_place_documents:
            yield from check_placement(args)
            return
        parts = n * math.lcm(granularity(layout), sharers)
        what = f"the {layout} layout "
    if args.seq_length % parts:
        over = f"{n} context-parallel" + (f" x {sharers} sequence-parallel" if sharers > 1 else "")
        why = f"{what or 'its split '}over {over} ranks needs a multiple of {parts}"
        yield refusal(args, "seq_length", why, seq_length=math.ceil(args.seq_length / parts) * parts)


def check_placement(args: Arguments) -> Iterator[UsageError]:
    """The errors about placed documents. Without a strategy, it is not known yet."""
    parts = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    tokens = args.micro_batch_size * args.seq_length
    if tokens % parts:
        why = f"a micro batch of {tokens} tokens does not split over {parts} ranks"
        yield refusal(args, "seq_length", why, seq_length=math.ceil(args.seq_length / parts) * parts)
    if len({choice.plan(args.context_parallel_size).n for choice in args.cp_layers}) > 1:
        why = "the layers have different head-parallel sizes, so a rank would hold different tokens"
        yield without_types(args, refusal(args, "cp_strategy", why, cp_strategy=args.cp_layers[0].spec))
    if args.num_experts and args.moe_router_load_balancing_type == "seq_aux_loss" and args.micro_batch_size > 1:
        why = "--cp-place-documents lays the sequences of a micro batch end to end"
        yield refusal(args, "moe_router_load_balancing_type", why, moe_router_load_balancing_type="aux_loss")


def _check_plan(args: Arguments, choice: Choice) -> None:
    n, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    heads, kv_heads = args.num_attention_heads // tensor, max(1, args.num_query_groups // tensor)
    try:
        choice.plan(n, heads=heads, kv_heads=kv_heads)
    except UsageError:
        raise
    except Exception as error:  # from a user-defined strategy
        at = extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__}: {error} ({os.path.basename(at.filename)}, line {at.lineno})"
        raise UsageError(f"--cp-strategy {choice.spec}: failed to make a plan for {n} ranks: {where}") from error


def _check_schedule(args: Arguments) -> Iterator[UsageError]:
    first = batch_size(args, 0)
    if args.train_samples and args.train_samples < first and not args.skip_train:
        yield refusal(args, "train_samples", f"fewer than the {first} sequences of an update", train_samples=first)
    decay = decay_samples(args)
    if decay and warmup_samples(args) >= decay:
        unit, each = ("samples", 1) if args.train_samples else ("iters", args.global_batch_size)
        why = f"must end before the learning-rate decay ends, after {decay // each} {unit}"
        name = f"lr_warmup_{unit}"
        yield refusal(args, name, why, **{name: decay // each // 10})


def check_rampup(args: Flags, data_parallel_size: int) -> None:
    """Reject a batch ramp-up whose steps do not reach the global batch size, or do not split evenly over the ranks."""
    given = args.rampup_batch_size or []
    each = args.micro_batch_size * data_parallel_size
    whole = args.global_batch_size
    if args.num_layers_per_virtual_pipeline_stage:
        each *= args.pipeline_model_parallel_size  # the interleaved schedule needs whole rounds
    if whole % each:
        why = f"with --rampup-batch-size it must be a multiple of {each}, the sequences of a micro batch of all ranks"
        refuse(args, "global_batch_size", why, global_batch_size=max(whole // each, 1) * each)
    why = f"must be three numbers, START + a multiple of INCREMENT = --global-batch-size {whole}, multiples of {each}"
    good = len(given) == 3 and given[0] <= whole and (whole - given[0]) % given[1] == 0
    if not good or given[0] % each or given[1] % each:
        refuse(args, "rampup_batch_size", why, rampup_batch_size=[each, each, 100 * whole])


def _check_devices(args: Arguments) -> Iterator[UsageError]:
    """The errors about GPUs. A dry run may plan for other hosts: it needs no GPU and no library for GPUs."""
    import torch

    from megatron.context_parallel.integration.transformer_engine import check_importable, why_not_importable
    from megatron.context_parallel.kernels.choose import check_backend

    gpus = torch.cuda.device_count()
    backend = args.cp_attention_backend
    if gpus and not args.dry_run and (local := ranks_in("LOCAL_WORLD_SIZE", 1)) > gpus:
        why = f"this host has {gpus} GPUs; start with torchrun --nproc-per-node {gpus}"
        yield UsageError(f"LOCAL_WORLD_SIZE={local}: {why}")
    if args.fp16 and not (gpus or args.dry_run):
        yield refusal(args, "fp16", "needs a GPU, and this host has none; give --bf16, or neither")
    if args.optimizer_cpu_offload and not missing_for_optimizer_on_host(args) and not args.dry_run:
        if not gpus:
            both = " and --use-precision-aware-optimizer" if args.use_precision_aware_optimizer else ""
            why = f"needs a GPU; on this host the optimizer is in host memory already; leave it{both} out"
            yield refusal(args, "optimizer_cpu_offload", why)
        elif not args.use_torch_fsdp2 and (why := why_not_importable()):
            yield refusal(args, "optimizer_cpu_offload", f"needs Transformer Engine: {why}; leave it out")
    if args.distributed_backend == "nccl" and not (gpus or args.dry_run):
        yield refusal(args, "distributed_backend", "needs GPUs, and this host has none", distributed_backend="gloo")
    if args.distributed_backend == "gloo" and gpus and args.world_size > 1 and not args.dry_run:
        yield refusal(args, "distributed_backend", "does not send tensors of GPUs", distributed_backend="nccl")
    nccl = args.distributed_backend == "nccl" or ((gpus or args.dry_run) and not args.distributed_backend)
    for name in ("high_priority_stream_groups", "nccl_communicator_config_path"):
        if getattr(args, name) and not nccl:
            yield refusal(args, name, "has an effect only with NCCL, between GPUs; leave it out")
    if args.transformer_impl == "transformer_engine" and not (args.dry_run and (args.fp8 or not gpus)):
        yield from caught(check_importable)
    if args.fp8 and args.num_experts:
        yield refusal(args, "fp8", "needs Transformer Engine, which was not tested with experts; leave it out")
    elif args.fp8 and args.transformer_impl == "local":
        why = "needs Transformer Engine's linear layers"
        if not args.dry_run and (missing := why_not_importable()):
            yield refusal(args, "fp8", f"{why}: {missing}; leave it out, or install transformer-engine")
        else:
            yield refusal(args, "fp8", why, transformer_impl="transformer_engine")
    elsewhere = args.dry_run and not gpus and backend not in ("auto", "aten")
    device = "cuda" if gpus or elsewhere else "cpu"
    if args.longest and not (args.device_memory or args.cp_cluster):
        yield refusal(args, "longest", "needs a device", device_memory="80GB")
    if args.longest and not (args.cp_layers or args.cp_cluster):
        yield refusal(args, "longest", "needs a strategy, which is chosen when the run starts", cp_strategy="ring")
    irregular = next((FLAGS[n].option for n in ("window_size", "reset_attention_mask") if getattr(args, n)), None)
    what = backend, args.params_dtype, args.kv_channels
    yield from caught(check_backend, *what, device=device, irregular=irregular, on_this_host=not elsewhere)
    if device == "cuda":
        yield from caught(_check_blocks, args, not elsewhere)


def _check_blocks(args: Arguments, on_this_host: bool) -> None:
    """Reject a named library that cannot compute all blocks of a plan. The first and the last rank are checked."""
    from megatron.context_parallel.kernels.interface import Kernel
    from megatron.context_parallel.kernels.libraries import LIBRARIES
    from megatron.context_parallel.kernels.refusals import refusal_of_blocks
    from megatron.context_parallel.runtime.blocks import Blocks
    from megatron.context_parallel.tokens.layout import Chunks
    from megatron.context_parallel.tokens.mask import Mask

    if (library := LIBRARIES.get(args.cp_attention_backend)) is None:
        return
    what = args.cp_attention_backend, args.params_dtype, args.kv_channels
    cut = partial(library.cut_or_refuse, refuse=refusal_of_blocks(*what, on_this_host=on_this_host))
    only_cuts = cast(Kernel, SimpleNamespace(pieces=cut))
    for choice, backward in product(distinct(args.cp_layers), (False, True)):
        plan = choice.plan(args.context_parallel_size, backward=backward)
        chunks = Chunks.pair(choice.layout, plan.n, args.seq_length)
        blocks = Blocks(Mask(), *chunks, only_cuts)
        for step in (*plan.steps[0], *plan.steps[plan.n - 1]):
            for attend in step.attend:
                for chunk in attend.q_chunks:
                    blocks.pieces(chunk, attend.kv_chunks)


def _check_rerun(args: Arguments) -> Iterator[UsageError]:
    if args.rerun_mode == "report_stats":
        why = "megatron-core 0.16.1 fails when it prints its statistics"
        yield refusal(args, "rerun_mode", why, rerun_mode="validate_results")
    if args.rerun_mode != "disabled" and not (args.check_for_nan_in_loss_and_grad or args.check_for_spiky_loss):
        why = "there is nothing to validate with --no-check-for-nan-in-loss-and-grad"
        yield refusal(args, "rerun_mode", why, check_for_spiky_loss=True)


def _check_evaluation(args: Arguments) -> Iterator[UsageError]:
    why = "--skip-train leaves nothing to do"
    if not args.eval_iters:
        yield refusal(args, "eval_iters", why, eval_iters=FLAGS["eval_iters"].default)
    if args.train_data_path and not (args.valid_data_path or args.test_data_path):
        yield refusal(args, "train_data_path", f"{why} without --valid-data-path or --test-data-path; give one of them")
    if args.split and not any(map(float, args.split.split(",")[1:])):
        yield refusal(args, "split", why, split=SPLIT)


def _check_profile(args: Arguments) -> Iterator[UsageError]:
    start, end = args.profile_step_start, args.profile_step_end
    if start >= end:
        why = f"must be below --profile-step-end {end}"
        yield refusal(args, "profile_step_start", why, profile_step_end=start + 2)
    if 0 < (last := args.train_iters) <= start:
        why = f"the run ends earlier, with --train-iters {last}"
        yield refusal(args, "profile_step_start", why, profile_step_start=last - 1)
    if absent := [rank for rank in args.profile_ranks if rank >= args.world_size]:
        why = f"there is no rank {absent[0]} among the {args.world_size} ranks"
        yield refusal(args, "profile_ranks", why, profile_ranks=[0])
    if args.use_pytorch_profiler and not args.tensorboard_dir:
        why = "needs a directory for its traces; give --tensorboard-dir DIR, or --save DIR"
        yield refusal(args, "use_pytorch_profiler", why)
    import torch

    if not (args.use_pytorch_profiler or args.dry_run or torch.cuda.is_available()):
        yield refusal(args, "profile", "nsys profiles GPUs, and this host has none", use_pytorch_profiler=True)


def _check_data(args: Arguments) -> Iterator[UsageError]:
    if args.sft or args.pack_documents:
        return  # the data tells where documents end
    for name in ("eod_mask_loss", "reset_attention_mask", "reset_position_ids", "mock_data"):
        if args.eod_token is None and getattr(args, name):
            why = f"the tokenizer {args.tokenizer_model or args.tokenizer_type} has no end-of-document token"
            yield refusal(args, name, f"{why}; leave the flag out or give a tokenizer with an eos_token")
