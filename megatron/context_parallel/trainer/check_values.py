"""Checks on the arguments themselves: each value, and values that must fit together. No file is opened."""

import math
import os
from argparse import Namespace

import torch

from ..errors import UsageError
from ..heads import check_heads
from ..kernels.choose import check_backend
from ..layout import LAYOUTS
from ..mask import Mask
from ..strategies import find_strategy

_REQUIRED = {
    "num_layers": 24,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "micro_batch_size": 1,
}
# The smallest value allowed, and one that works, of the whole numbers that may be given.
_AT_LEAST = {
    "num_layers": (1, 24),
    "hidden_size": (1, 1024),
    "ffn_hidden_size": (1, 4096),
    "num_attention_heads": (1, 16),
    "kv_channels": (1, 128),
    "num_query_groups": (1, 8),
    "max_position_embeddings": (1, 2048),
    "seq_length": (1, 2048),
    "rotary_base": (1, 10000),
    "make_vocab_size_divisible_by": (1, 128),
    "vocab_size": (1, 32000),
    "micro_batch_size": (1, 1),
    "global_batch_size": (1, 8),
    "train_iters": (1, 1000),
    "train_samples": (1, 100000),
    "lr_decay_iters": (1, 1000),
    "lr_decay_samples": (1, 100000),
    "lr_warmup_iters": (0, 100),
    "lr_warmup_samples": (0, 10000),
    "exit_interval": (1, 100),
    "exit_duration_in_mins": (1, 230),
    "recompute_num_layers": (1, 1),
    "save_interval": (1, 100),
    "tensor_model_parallel_size": (1, 1),
    "pipeline_model_parallel_size": (1, 1),
    "context_parallel_size": (1, 1),
    "cp_head_parallel_size": (1, 2),
    "cp_inner_ring_size": (1, 2),
    "num_layers_per_virtual_pipeline_stage": (1, 1),
    "distributed_timeout_minutes": (1, 10),
    "num_workers": (0, 2),
    "eval_iters": (0, 100),
    "eval_interval": (1, 1000),
    "log_interval": (1, 100),
    "seed": (1, 1234),
    "hysteresis": (1, 2),
}
# (smallest, whether itself allowed, largest, whether itself allowed, one that works)
_WITHIN = {
    "lr": (0, False, math.inf, False, 3e-4),
    "min_lr": (0, True, math.inf, False, 3e-5),
    "lr_warmup_fraction": (0, True, 1, False, 0.01),
    "weight_decay": (0, True, math.inf, False, 0.1),
    "clip_grad": (0, True, math.inf, False, 1.0),
    "adam_beta1": (0, True, 1, False, 0.9),
    "adam_beta2": (0, True, 1, False, 0.95),
    "adam_eps": (0, False, math.inf, False, 1e-8),
    "norm_epsilon": (0, False, math.inf, False, 1e-5),
    "init_method_std": (0, False, math.inf, False, 0.02),
    "rotary_percent": (0, False, 1, True, 1.0),
    "hidden_dropout": (0, True, 1, False, 0.0),
    "attention_dropout": (0, True, 1, False, 0.0),
    "loss_scale": (0, False, math.inf, False, 65536),
    "initial_loss_scale": (0, False, math.inf, False, 65536),
    "min_loss_scale": (0, False, math.inf, False, 1.0),
    "loss_scale_window": (0, False, math.inf, False, 1000),
    "peak_tflops": (0, False, math.inf, False, 989),
}


def refuse(args: Namespace, name: str, why: str) -> None:
    """Raise the UsageError of the flag whose attribute is `name`; `why` ends with a value that works."""
    value = getattr(args, name)
    shown = " ".join(map(str, value)) if isinstance(value, list) else "" if value is True else value
    raise UsageError(f"{flag(name)} {shown}".rstrip() + f": {why}")


def flag(name: str) -> str:
    """--num-layers for num_layers."""
    return "--" + name.replace("_", "-")


def refuse_given(args: Namespace, name: str, why: str) -> None:
    """`refuse` if the flag was given a value."""
    if getattr(args, name):
        refuse(args, name, why)


def quotient(args: Namespace, name: str, by: str) -> int:
    """`args.name` / `args.by`.

    Raises:
        UsageError: not a whole number.
    """
    value, divisor = getattr(args, name), getattr(args, by)
    if value % divisor:
        fits = max(value // divisor, 1) * divisor
        refuse(args, name, f"must be a multiple of {flag(by)} {divisor}; give {flag(name)} {fits}")
    return value // divisor


def from_environment(name: str, default: int) -> int:
    """The whole number in environment variable `name`.

    Raises:
        UsageError: it holds something else.
    """
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise UsageError(
            f"{name}={value} in the environment: not a number of ranks; start with torchrun, or unset {name}"
        )
    return int(value)


# ------------------------------------------------------------------------------------------------- each value


def check_each(args: Namespace) -> None:
    """Refuse what is missing or out of range by itself."""
    training = {} if args.dry_run else {"lr": 3e-4}
    for name, example in (_REQUIRED | training).items():
        if getattr(args, name) is None:
            raise UsageError(f"{flag(name)}: missing; give {flag(name)} {example}{_or_preset(name)}")
    if args.train_iters is None and args.train_samples is None and not args.dry_run:
        raise UsageError("--train-iters: missing; give --train-iters 1000, or --train-samples")
    for name, (smallest, example) in _AT_LEAST.items():
        value = getattr(args, name)
        if value is not None and value < smallest:
            refuse(args, name, f"must be {smallest} or more; give {flag(name)} {example}")
    for name, (low, low_too, high, high_too, example) in _WITHIN.items():
        value = getattr(args, name)
        if value is not None and not (low < value < high or (value == low and low_too) or (value == high and high_too)):
            bound = f"above {low}" if not low_too else f"{low} or more"
            bound += "" if high == math.inf else f", {high} at most" if high_too else f", below {high}"
            refuse(args, name, f"must be {bound}; give {flag(name)} {example}")


def _or_preset(name: str) -> str:
    return ", or a --preset" if name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length") else ""


# ---------------------------------------------------------------------------------------------------- together


def check_world(args: Namespace, needed: int) -> None:
    """Refuse a number of ranks that the parallel sizes, whose product is `needed`, do not divide."""
    if args.world_size < 1 or args.world_size % needed:
        sizes = {
            name: getattr(args, name)
            for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        }
        # Name the size that does not divide by itself, or else the largest.
        name = next((n for n in sizes if args.world_size % sizes[n]), max(sizes, key=sizes.get))
        product = "" if needed == sizes[name] else f" (tensor x pipeline x context = {needed})"
        refuse(
            args,
            name,
            f"does not divide the {args.world_size} ranks started{product}; "
            f"start {max(needed, args.world_size // needed * needed)} ranks (torchrun --nproc-per-node), "
            f"or give {flag(name)} {math.gcd(sizes[name], max(1, args.world_size * sizes[name] // needed))}",
        )
    if not args.dry_run:
        _check_devices()


def _check_devices() -> None:
    local = from_environment("LOCAL_WORLD_SIZE", 1)
    if torch.cuda.is_available() and local > torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UsageError(
            f"LOCAL_WORLD_SIZE={local}: this host has {count} GPUs; give torchrun --nproc-per-node {count}"
        )


def virtual_stages(args: Namespace) -> int | None:
    """Virtual stages per pipeline rank; None without an interleaved pipeline."""
    layers = quotient(args, "num_layers", "pipeline_model_parallel_size")
    name, each = "num_layers_per_virtual_pipeline_stage", args.num_layers_per_virtual_pipeline_stage
    if each is None:
        return None
    if args.pipeline_model_parallel_size == 1:
        refuse(args, name, "needs a pipeline; give --pipeline-model-parallel-size 2 or leave it out")
    if layers % each:
        fits = next(n for n in range(min(each, layers), 0, -1) if layers % n == 0)
        refuse(args, name, f"does not divide the {layers} layers of a pipeline stage; give {flag(name)} {fits}")
    return layers // each if layers > each else None


def check_samples(args: Namespace) -> None:
    """Refuse sample counts that are not whole iterations, and iterations beside them."""
    for name in ("train_iters", "lr_decay_iters", "lr_warmup_iters"):
        refuse_given(args, name, f"does not go with --train-samples; give {flag(name).replace('iters', 'samples')}")
    for name in ("train_samples", "lr_decay_samples", "lr_warmup_samples"):
        if getattr(args, name):
            quotient(args, name, "global_batch_size")


def check_together(args: Namespace) -> None:
    """Refuse values that do not fit each other; needs the derived values."""
    _check_model(args)
    _check_context_parallel(args)
    _check_batches(args)
    _check_schedule(args)
    _check_precision(args)
    _check_attention_backend(args)
    _check_distributed(args)
    _check_recompute(args)
    _check_data_flags(args)


def _check_model(args: Namespace) -> None:
    quotient(args, "num_attention_heads", "tensor_model_parallel_size")
    quotient(args, "ffn_hidden_size", "tensor_model_parallel_size")
    heads, groups, tensor = args.num_attention_heads, args.num_query_groups, args.tensor_model_parallel_size
    if heads % groups:
        fits = next(n for n in range(min(groups, heads), 0, -1) if heads % n == 0)
        refuse(
            args, "num_query_groups", f"does not divide --num-attention-heads {heads}; give --num-query-groups {fits}"
        )
    if groups % tensor and tensor % groups:
        why = f"neither divides nor is a multiple of --tensor-model-parallel-size {tensor}"
        refuse(args, "num_query_groups", f"{why}; give --tensor-model-parallel-size {math.gcd(groups, tensor)}")
    if args.max_position_embeddings < args.seq_length:
        why = f"more than --max-position-embeddings {args.max_position_embeddings}"
        refuse(args, "seq_length", f"{why}; give --max-position-embeddings {args.seq_length}")
    if args.position_embedding_type == "rope" and int(args.kv_channels * args.rotary_percent) % 2:
        refuse(args, "kv_channels", f"RoPE needs an even width; give --kv-channels {args.kv_channels + 1}")


def _check_context_parallel(args: Namespace) -> None:
    strategy = find_strategy(args.cp_strategy)
    if args.cp_layout not in LAYOUTS:
        refuse(args, "cp_layout", f"unknown; choose one of {', '.join(LAYOUTS)}")
    if args.attention_dropout:
        refuse(args, "attention_dropout", "context-parallel attention has no dropout; give --attention-dropout 0")
    if args.window_size:
        before, after = Mask(True, args.window_size).window
        if after > 0:
            refuse(args, "window_size", f"no token sees those after it; give --window-size {before},0")
    plan = strategy.plan(args.context_parallel_size, layout=args.cp_layout, **args.cp_options)
    tensor = args.tensor_model_parallel_size
    if args.cp_strategy == "usp" and args.context_parallel_size > 1 and plan.heads == 1:
        raise UsageError("--cp-strategy usp: needs --cp-head-parallel-size 2 or more; with 1 it is --cp-strategy ring")
    check_heads(plan, args.num_attention_heads // tensor, max(1, args.num_query_groups // tensor))
    slices = 2 if args.cp_layout == "zigzag" else 1
    tensor = args.tensor_model_parallel_size if args.sequence_parallel else 1
    parts = args.context_parallel_size * math.lcm(slices, tensor)
    if args.seq_length % parts:
        over = f"{args.context_parallel_size} context-parallel" + (
            f" x {tensor} sequence-parallel" if tensor > 1 else ""
        )
        fits = math.ceil(args.seq_length / parts) * parts
        why = f"the {args.cp_layout} layout over {over} ranks needs a multiple of {parts}"
        refuse(args, "seq_length", f"{why}; give --seq-length {fits}")


def _check_batches(args: Namespace) -> None:
    step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % step:
        fits = math.ceil(args.global_batch_size / step) * step
        why = f"must be a multiple of --micro-batch-size x data-parallel size = {step}"
        refuse(args, "global_batch_size", f"{why}; give --global-batch-size {fits}")
    stages, count = args.pipeline_model_parallel_size, args.global_batch_size // step
    if args.virtual_pipeline_model_parallel_size and count % stages:
        fits = math.ceil(count / stages) * stages * step
        why = f"these are {count} micro batches, and an interleaved pipeline needs a multiple of its {stages} stages"
        refuse(args, "global_batch_size", f"{why}; give --global-batch-size {fits}")


def _check_schedule(args: Namespace) -> None:
    if args.lr is not None and args.min_lr > args.lr:
        refuse(args, "min_lr", f"more than --lr {args.lr}; give --min-lr {args.lr / 10:g}")
    if args.train_samples is None:
        for name in ("lr_decay_samples", "lr_warmup_samples"):
            refuse_given(args, name, f"goes with --train-samples; give {flag(name).replace('samples', 'iters')}")
    if args.lr_warmup_fraction is not None:
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            refuse_given(args, name, "does not go with --lr-warmup-fraction; leave one of the two out")
    decay = args.lr_decay_iters or args.train_iters
    if decay is not None and args.lr_warmup_iters >= decay:
        unit = "iters" if args.train_samples is None else "samples"
        scale = 1 if args.train_samples is None else args.global_batch_size
        why = f"must end before the decay does, after {decay * scale} {unit}"
        refuse(args, f"lr_warmup_{unit}", f"{why}; give --lr-warmup-{unit} {decay // 10 * scale}")


def _check_precision(args: Namespace) -> None:
    if args.bf16 and args.fp16:
        raise UsageError("--fp16 and --bf16: only one of them; give --bf16")
    if args.fp16 and not torch.cuda.is_available():
        raise UsageError("--fp16: needs a GPU, and there is none here; give --bf16, or neither")
    if args.loss_scale is not None and not args.fp16:
        refuse(args, "loss_scale", "goes with --fp16; leave it out")


def _check_attention_backend(args: Namespace) -> None:
    backend, gpu = args.cp_attention_backend, torch.cuda.is_available()
    elsewhere = args.dry_run and not gpu and backend not in ("auto", "aten")  # a plan for hosts with GPUs
    device = "cuda" if gpu or elsewhere else "cpu"
    irregular = next((flag(name) for name in ("window_size", "reset_attention_mask") if getattr(args, name)), None)
    check_backend(backend, args.params_dtype, args.kv_channels, device=device, irregular=irregular, here=not elsewhere)


def _check_distributed(args: Namespace) -> None:
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        why = "needs tensor-parallel ranks, and --tensor-model-parallel-size is 1"
        refuse(args, "sequence_parallel", f"{why}; give --tensor-model-parallel-size 2 or leave it out")
    if args.overlap_param_gather and not (args.use_distributed_optimizer and args.overlap_grad_reduce):
        needs = "--use-distributed-optimizer and --overlap-grad-reduce"
        refuse(args, "overlap_param_gather", f"needs {needs}; add them or leave it out")
    if args.distributed_backend == "nccl" and not (torch.cuda.is_available() or args.dry_run):
        refuse(args, "distributed_backend", "needs GPUs, and there is none here; give --distributed-backend gloo")


def _check_recompute(args: Namespace) -> None:
    full = args.recompute_granularity == "full"
    if full and args.recompute_activations:
        refuse(args, "recompute_activations", "means selective, not --recompute-granularity full; leave one out")
    if not full:
        refuse_given(args, "recompute_whitelist", "needs --recompute-granularity full; add it or leave this out")
    for name in ("recompute_method", "recompute_num_layers"):
        if full and getattr(args, name) is None:
            why = "needs --recompute-method and --recompute-num-layers"
            refuse(args, "recompute_granularity", f"{why}; give --recompute-method uniform --recompute-num-layers 1")
        if not full:
            refuse_given(args, name, "needs --recompute-granularity full; add it or leave this out")
    layers = args.num_layers // args.pipeline_model_parallel_size // (args.virtual_pipeline_model_parallel_size or 1)
    if full and args.recompute_num_layers > layers:
        refuse(args, "recompute_num_layers", f"a stage has {layers} layers; give --recompute-num-layers {layers}")


def check_end_token(args: Namespace) -> None:
    """Refuse what documents' ends are needed for if the tokenizer has no token for them."""
    for name in ("eod_mask_loss", "reset_attention_mask", "reset_position_ids"):
        if args.eod_token is None:
            why = f"the tokenizer {args.tokenizer_model or args.tokenizer_type} has no end-of-document token"
            refuse_given(args, name, f"{why}; leave the flag out or give a tokenizer with an eos_token")


def _check_data_flags(args: Namespace) -> None:
    per_split = [name for name in ("train_data_path", "valid_data_path", "test_data_path") if getattr(args, name)]
    if args.data_path and per_split:
        refuse(args, per_split[0], "does not go with --data-path; leave one of the two out")
    if per_split and not args.train_data_path:
        refuse(args, per_split[0], "there is nothing to train on; give --train-data-path PREFIX too")
    if args.split is not None and not args.data_path:
        refuse(args, "split", "divides --data-path; give --data-path PREFIX")
    if args.split is not None:
        shares = args.split.split(",")
        try:
            numbers = [float(share) for share in shares]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 3 or not all(0 <= n < math.inf for n in numbers) or numbers[0] == 0:
            refuse(args, "split", "not shares for training, validation and test; give --split 969,30,1")
    if args.save_interval and not args.save:
        refuse(args, "save_interval", "there is nowhere to save; give --save DIR")
    if args.exit_on_missing_checkpoint and not args.load:
        refuse(args, "exit_on_missing_checkpoint", "goes with --load; give --load DIR")
