"""Checks on values that must fit each other, this host and the ranks started. No file is opened."""

import math
import os

import torch

from ..errors import UsageError
from ..kernels.choose import check_backend
from ..mask import Mask
from .check_flags import given, refuse
from .flags import FLAGS, Arguments, Flags

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def quotient(args: Flags, name: str, by: str) -> int:
    """`args.name` / `args.by`.

    Raises:
        UsageError: not a whole number.
    """
    value, divisor = getattr(args, name), getattr(args, by)
    if value % divisor:
        refuse(args, name, f"must be a multiple of {given(args, by)}", **{name: max(value // divisor, 1) * divisor})
    return value // divisor


def ranks_in(variable: str, default: int) -> int:
    """The whole number in an environment variable.

    Raises:
        UsageError: it holds something else.
    """
    value = os.environ.get(variable, str(default))
    if not value.isdecimal():
        why = f"not a number of ranks; start with torchrun, or unset {variable}"
        raise UsageError(f"{variable}={value} in the environment: {why}")
    return int(value)


def check_world(args: Flags, world_size: int, needed: int) -> None:
    """Refuse a number of ranks that the parallel sizes, whose product is `needed`, do not divide."""
    if world_size < 1 or world_size % needed:
        sizes: dict[str, int] = {name: getattr(args, name) for name in _SIZES}
        # Name the size that does not divide by itself, or else the largest.
        name = next((n for n in sizes if world_size % sizes[n]), max(sizes, key=lambda n: sizes[n]))
        product = "" if needed == sizes[name] else f" (tensor x pipeline x context = {needed})"
        fits = FLAGS[name].given(math.gcd(sizes[name], max(1, world_size * sizes[name] // needed)))
        start = f"start {max(needed, world_size // needed * needed)} ranks (torchrun --nproc-per-node)"
        refuse(args, name, f"does not divide the {world_size} ranks started{product}; {start}, or give {fits}")
    gpus = torch.cuda.device_count()
    if gpus and not args.dry_run and (local := ranks_in("LOCAL_WORLD_SIZE", 1)) > gpus:
        why = f"this host has {gpus} GPUs; give torchrun --nproc-per-node {gpus}"
        raise UsageError(f"LOCAL_WORLD_SIZE={local}: {why}")


def check_together(args: Arguments) -> None:
    """Refuse values that do not fit each other.

    Raises:
        UsageError: one line that names one of the flags, its value and a value that fits.
    """
    _check_model(args)
    _check_stages(args)
    _check_context_parallel(args)
    _check_batches(args)
    _check_schedule(args)
    _check_devices(args)
    _check_documents(args)


def _check_model(args: Arguments) -> None:
    quotient(args, "num_attention_heads", "tensor_model_parallel_size")
    quotient(args, "ffn_hidden_size", "tensor_model_parallel_size")
    heads, groups, tensor = args.num_attention_heads, args.num_query_groups, args.tensor_model_parallel_size
    if heads % groups:
        why = f"does not divide --num-attention-heads {heads}"
        refuse(args, "num_query_groups", why, num_query_groups=_divisor(heads, groups))
    if groups % tensor and tensor % groups:
        why = f"neither divides nor is a multiple of --tensor-model-parallel-size {tensor}"
        refuse(args, "num_query_groups", why, tensor_model_parallel_size=math.gcd(groups, tensor))
    if args.max_position_embeddings < args.seq_length:
        why = f"more than --max-position-embeddings {args.max_position_embeddings}"
        refuse(args, "seq_length", why, max_position_embeddings=args.seq_length)
    if args.position_embedding_type == "rope" and int(args.kv_channels * args.rotary_percent) % 2:
        refuse(args, "kv_channels", "RoPE needs an even width", kv_channels=args.kv_channels + 1)


def _divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most this one."""
    return next(n for n in range(min(most, number), 0, -1) if number % n == 0)


def _check_stages(args: Arguments) -> None:
    layers = quotient(args, "num_layers", "pipeline_model_parallel_size")
    turn, each = "num_layers_per_virtual_pipeline_stage", args.num_layers_per_virtual_pipeline_stage
    if each and args.pipeline_model_parallel_size == 1:
        refuse(args, turn, "needs a pipeline; give --pipeline-model-parallel-size 2 or leave it out")
    if each and layers % each:
        why = f"does not divide the {layers} layers of a pipeline stage"
        refuse(args, turn, why, **{turn: _divisor(layers, each)})
    if args.recompute_granularity != "full":
        return
    if not (args.recompute_method and args.recompute_num_layers):
        why = "needs --recompute-method and --recompute-num-layers"
        refuse(args, "recompute_granularity", why, recompute_method="uniform", recompute_num_layers=1)
    layers //= args.virtual_pipeline_model_parallel_size or 1
    if args.recompute_num_layers > layers:
        refuse(args, "recompute_num_layers", f"a stage has {layers} layers", recompute_num_layers=layers)


def _check_context_parallel(args: Arguments) -> None:
    if args.attention_dropout:
        refuse(args, "attention_dropout", "context-parallel attention has no dropout", attention_dropout=0)
    if args.window_size:
        before, after = Mask(True, args.window_size).window
        if after > 0:
            refuse(args, "window_size", "no token sees those after it", window_size=f"{before},0")
    n, tensor = args.context_parallel_size, args.tensor_model_parallel_size
    args.cp.plan(n, heads=args.num_attention_heads // tensor, kv_heads=max(1, args.num_query_groups // tensor))
    sharers = tensor if args.sequence_parallel else 1
    parts = n * math.lcm(2 if args.cp.layout == "zigzag" else 1, sharers)
    if args.seq_length % parts:
        over = f"{n} context-parallel" + (f" x {sharers} sequence-parallel" if sharers > 1 else "")
        why = f"the {args.cp.layout} layout over {over} ranks needs a multiple of {parts}"
        refuse(args, "seq_length", why, seq_length=math.ceil(args.seq_length / parts) * parts)


def _check_batches(args: Arguments) -> None:
    step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % step:
        why = f"must be a multiple of --micro-batch-size x data-parallel size = {step}"
        refuse(args, "global_batch_size", why, global_batch_size=math.ceil(args.global_batch_size / step) * step)
    stages, count = args.pipeline_model_parallel_size, args.global_batch_size // step
    if args.virtual_pipeline_model_parallel_size and count % stages:
        why = f"these are {count} micro batches, and an interleaved pipeline needs a multiple of its {stages} stages"
        refuse(args, "global_batch_size", why, global_batch_size=math.ceil(count / stages) * stages * step)
    for name in ("train_samples", "lr_decay_samples", "lr_warmup_samples"):
        if getattr(args, name):
            quotient(args, name, "global_batch_size")


def _check_schedule(args: Arguments) -> None:
    if args.lr and args.min_lr > args.lr:
        refuse(args, "min_lr", f"more than --lr {args.lr}", min_lr=f"{args.lr / 10:g}")
    decay = args.lr_decay_iters or args.train_iters
    if decay and args.lr_warmup_iters >= decay:
        unit, scale = ("samples", args.global_batch_size) if args.train_samples else ("iters", 1)
        why, name = f"must end before the decay does, after {decay * scale} {unit}", f"lr_warmup_{unit}"
        refuse(args, name, why, **{name: decay // 10 * scale})


def _check_devices(args: Arguments) -> None:
    gpu, backend = torch.cuda.is_available(), args.cp_attention_backend
    if args.fp16 and not gpu:
        refuse(args, "fp16", "needs a GPU, and there is none here; give --bf16, or neither")
    if args.distributed_backend == "nccl" and not (gpu or args.dry_run):
        refuse(args, "distributed_backend", "needs GPUs, and there is none here", distributed_backend="gloo")
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        why = "needs tensor-parallel ranks, and --tensor-model-parallel-size is 1"
        refuse(args, "sequence_parallel", f"{why}; give --tensor-model-parallel-size 2 or leave it out")
    elsewhere = args.dry_run and not gpu and backend not in ("auto", "aten")  # a plan for hosts with GPUs
    device = "cuda" if gpu or elsewhere else "cpu"
    irregular = next((FLAGS[n].option for n in ("window_size", "reset_attention_mask") if getattr(args, n)), None)
    check_backend(backend, args.params_dtype, args.kv_channels, device=device, irregular=irregular, here=not elsewhere)


def _check_documents(args: Arguments) -> None:
    for name in ("eod_mask_loss", "reset_attention_mask", "reset_position_ids"):
        if args.eod_token is None and getattr(args, name):
            why = f"the tokenizer {args.tokenizer_model or args.tokenizer_type} has no end-of-document token"
            refuse(args, name, f"{why}; leave the flag out or give a tokenizer with an eos_token")
    if args.split is not None and not _are_shares(args.split):
        refuse(args, "split", "not shares for training, validation and test", split="969,30,1")


def _are_shares(split: str) -> bool:
    try:
        shares = [float(share) for share in split.split(",")]
    except ValueError:
        return False
    return len(shares) <= 3 and all(0 <= share < math.inf for share in shares) and shares[0] > 0
