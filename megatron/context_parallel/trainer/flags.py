"""The flags of the trainer, group by group: Megatron's names, meanings and defaults."""

import argparse
from argparse import ArgumentParser

from ..kernels.choose import BACKENDS
from ..layout import LAYOUTS
from ..plan.ir import PLACEMENTS
from ..strategies import STRATEGIES
from .presets import PRESETS
from .tokenizer import TOKENIZERS


def _flag(group, name: str, kind: type, default: object, text: str, **options) -> None:
    """Add `--name VALUE`. `default` None means derived, or nothing: `text` says which."""
    shown = "" if default is None else f" (default: {default})"
    if "choices" not in options:
        options.setdefault("metavar", {int: "N", float: "X"}.get(kind, "TEXT"))
    group.add_argument(f"--{name}", type=kind, default=default, help=(text + shown).replace("%", "%%"), **options)


def _switch(group, name: str, text: str, **options) -> None:
    group.add_argument(f"--{name}", action=options.pop("action", "store_true"), help=text, **options)


def _toggle(group, name: str, text: str) -> None:
    group.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=text)


def grid(text: str) -> tuple[int, int]:
    """`3x4` as (3, 4)."""
    rows, columns = map(int, text.split("x"))
    return rows, columns


def window(text: str) -> tuple[int, int]:
    """`4096,0` or `(4096,0)` as (4096, 0)."""
    before, after = map(int, text.strip("()").split(","))
    return before, after


def build_parser() -> ArgumentParser:
    """The parser of every flag, without the checks that need more than one flag."""
    parser = ArgumentParser(
        prog="pretrain_gpt.py",
        usage="torchrun --nproc-per-node N pretrain_gpt.py [--preset NAME] [--config FILE] [flags]",
        description="Pretrain a GPT or Llama with tensor, pipeline, data and context parallelism. "
        "Flags have Megatron's names and meanings.",
        allow_abbrev=False,
        exit_on_error=False,
    )
    run = parser.add_argument_group("run")
    source_flags(run)
    _switch(run, "dry-run", "check everything, print parallel layout, parameters and memory, and stop")
    for title, add in _GROUPS.items():
        add(parser.add_argument_group(title))
    return parser


def source_flags(group) -> None:
    names = ", ".join(PRESETS)
    _flag(group, "preset", str, None, f"shape of a published model: {names}", metavar="NAME")
    _flag(
        group,
        "config",
        str,
        None,
        "YAML file of flags, which win over --preset and lose to the command line",
        metavar="FILE",
    )


def _model(group) -> None:
    _flag(group, "num-layers", int, None, "transformer layers; required")
    _flag(group, "hidden-size", int, None, "model width; required")
    _flag(group, "ffn-hidden-size", int, None, "MLP width (default: 4 hidden-size; with --swiglu 2/3 of it, in 64s)")
    _flag(group, "num-attention-heads", int, None, "query heads; required")
    _flag(group, "kv-channels", int, None, "width of a head (default: hidden-size / num-attention-heads)")
    _switch(group, "group-query-attention", "query heads share key/value heads")
    _flag(group, "num-query-groups", int, None, "key/value heads, with --group-query-attention (default: 1)")
    _flag(group, "max-position-embeddings", int, None, "rows of the position table (default: seq-length)")
    kinds = ["learned_absolute", "rope"]
    _flag(group, "position-embedding-type", str, "learned_absolute", "how positions enter", choices=kinds)
    _flag(group, "rotary-base", int, 10000, "base of the rotary frequencies")
    _flag(group, "rotary-percent", float, 1.0, "part of each head that rotates")
    _flag(group, "normalization", str, "LayerNorm", "normalization layers", choices=["LayerNorm", "RMSNorm"])
    _flag(group, "norm-epsilon", float, 1e-5, "epsilon of the normalization layers")
    text = "tokens before and after itself that a token sees, such as 4096,0; -1: all (default: all before)"
    _flag(group, "window-size", window, None, text, metavar="BEFORE,AFTER")
    _switch(group, "qk-layernorm", "normalize queries and keys in each head")
    _switch(group, "swiglu", "gated linear units with SiLU instead of GELU")
    _switch(group, "disable-bias-linear", "no biases in linear layers", action="store_false", dest="add_bias_linear")
    _switch(group, "add-qkv-bias", "biases in the query/key/value projection even with --disable-bias-linear")
    _switch(group, "untie-embeddings-and-output-weights", "an output layer of its own")
    _flag(
        group, "make-vocab-size-divisible-by", int, 128, "pad the vocabulary to a multiple of this times tensor ranks"
    )
    _flag(group, "init-method-std", float, 0.02, "standard deviation of the initial weights")


def _regularization(group) -> None:
    why = "context-parallel attention has no dropout, so only 0 is accepted; Megatron's default is 0.1"
    _flag(group, "attention-dropout", float, 0.0, why)
    _flag(group, "hidden-dropout", float, 0.0, "dropout of the residual stream; Megatron's default is 0.1")
    _flag(group, "weight-decay", float, 0.01, "decoupled (AdamW) weight decay")
    _flag(group, "clip-grad", float, 1.0, "largest norm of the gradient; 0: no limit")
    _flag(group, "adam-beta1", float, 0.9, "decay of the mean gradient")
    _flag(group, "adam-beta2", float, 0.999, "decay of the mean squared gradient")
    _flag(group, "adam-eps", float, 1e-8, "added to Adam's denominator")


def _training(group) -> None:
    _flag(group, "micro-batch-size", int, None, "sequences per forward pass and data-parallel rank; required")
    _flag(
        group, "global-batch-size", int, None, "sequences per update (default: micro-batch-size x data-parallel size)"
    )
    _flag(group, "train-iters", int, None, "updates; this or --train-samples is required")
    _flag(group, "train-samples", int, None, "sequences to train on, a multiple of the global batch size")
    _flag(group, "exit-interval", int, None, "save and leave after an iteration that is a multiple of this")
    _flag(group, "exit-duration-in-mins", int, None, "save and leave after this many minutes")
    _switch(group, "exit-signal-handler", "save and leave on SIGTERM")
    _flag(group, "seed", int, 1234, "seed of weights, data order and dropout")
    kinds = ["full", "selective"]
    _flag(
        group,
        "recompute-granularity",
        str,
        None,
        "recompute layers, or only attention, in the backward pass",
        choices=kinds,
    )
    kinds = ["uniform", "block"]
    _flag(group, "recompute-method", str, None, "with full: groups of layers, or the first ones", choices=kinds)
    _flag(group, "recompute-num-layers", int, None, "with full: layers per group, or how many come first")
    text = "with full: what is kept instead, output and all (Selective Checkpoint++)"
    kinds = ["core_attention"]
    _flag(group, "recompute-whitelist", str, [], text, nargs="+", choices=kinds, metavar="NAME")
    _switch(group, "recompute-activations", "the same as --recompute-granularity selective")


def _learning_rate(group) -> None:
    _flag(group, "lr", float, None, "largest learning rate; required")
    styles = ["constant", "linear", "cosine", "inverse-square-root"]
    _flag(group, "lr-decay-style", str, "linear", "shape of the decay", choices=styles)
    _flag(group, "lr-decay-iters", int, None, "iterations until --min-lr (default: train-iters)")
    _flag(group, "lr-decay-samples", int, None, "the same in sequences, with --train-samples")
    _flag(group, "lr-warmup-iters", int, 0, "iterations of linear warm-up from 0")
    _flag(group, "lr-warmup-samples", int, 0, "the same in sequences, with --train-samples")
    _flag(group, "lr-warmup-fraction", float, None, "warm-up as a part of the decay iterations")
    _flag(group, "min-lr", float, 0.0, "smallest learning rate")


def _checkpointing(group) -> None:
    _flag(group, "save", str, None, "directory of the checkpoints to write", metavar="DIR")
    _flag(group, "save-interval", int, None, "iterations between checkpoints; one is always written at the end")
    _switch(group, "no-save-optim", "leave the optimizer out of checkpoints")
    _switch(group, "no-save-rng", "leave the random generators out of checkpoints")
    _flag(
        group,
        "load",
        str,
        None,
        "directory of checkpoints to go on from; none there: start from scratch",
        metavar="DIR",
    )
    _switch(group, "no-load-optim", "do not restore the optimizer")
    _switch(group, "no-load-rng", "do not restore the random generators")
    _switch(group, "finetune", "restore the weights alone and start at iteration 0")
    _switch(group, "exit-on-missing-checkpoint", "an error if --load holds no checkpoint")
    _flag(group, "ckpt-format", str, "torch_dist", "format of checkpoints", choices=["torch_dist"])


def _mixed_precision(group) -> None:
    _switch(group, "bf16", "bfloat16 weights and activations; gradients and optimizer in float32")
    _switch(group, "fp16", "float16 weights and activations, on GPUs; gradients and optimizer in float32")
    _flag(group, "loss-scale", float, None, "fp16: a constant loss scale (default: dynamic)")
    _flag(group, "initial-loss-scale", float, 2**32, "fp16: first dynamic loss scale")
    _flag(group, "min-loss-scale", float, 1.0, "fp16: smallest dynamic loss scale")
    _flag(group, "loss-scale-window", float, 1000, "fp16: iterations before the loss scale is raised")
    _flag(group, "hysteresis", int, 2, "fp16: overflows before the loss scale is lowered")


def _distributed(group) -> None:
    _flag(group, "tensor-model-parallel-size", int, 1, "ranks that split every layer")
    _flag(group, "pipeline-model-parallel-size", int, 1, "ranks that split the layers into stages")
    _flag(group, "num-layers-per-virtual-pipeline-stage", int, None, "layers per turn of an interleaved pipeline")
    _switch(group, "sequence-parallel", "split norms and residuals over the tensor-parallel ranks too")
    _switch(group, "use-distributed-optimizer", "shard the optimizer over data- and context-parallel ranks")
    _switch(group, "overlap-grad-reduce", "reduce gradients during the backward pass")
    _switch(group, "overlap-param-gather", "gather sharded weights during the forward pass")
    kinds = ["nccl", "gloo"]
    _flag(group, "distributed-backend", str, None, "communication (default: nccl with GPUs, else gloo)", choices=kinds)
    _flag(group, "distributed-timeout-minutes", int, 10, "a rank that waits longer fails")


def _context_parallel(group) -> None:
    _flag(group, "context-parallel-size", int, 1, "ranks that share each sequence")
    _flag(group, "cp-strategy", str, "ring", f"distributed attention: {', '.join(STRATEGIES)}", metavar="NAME")
    text = f"which tokens a rank holds: {', '.join(LAYOUTS)} (default: the strategy's first choice)"
    _flag(group, "cp-layout", str, None, text, metavar="NAME")
    text = "ranks that split the heads; the strategy runs on the others (default: 1, with ulysses all)"
    _flag(group, "cp-head-parallel-size", int, None, text)
    text = "which ranks are neighbours: those that share tokens, or heads (default: head-first)"
    _flag(group, "cp-placement", str, None, text, choices=PLACEMENTS)
    text = "attention2d: rows x columns; mesh: query x key/value chunks of a tile (default: the best)"
    _flag(group, "cp-grid", grid, None, text, metavar="RxC")
    _toggle(group, "cp-overlap", "attention2d: rings that overlap with compute, or collectives (default: overlap)")
    _toggle(group, "cp-balance", "lightseq: early ranks help late ones under a causal mask (default: balance)")
    _toggle(group, "cp-prefetch", "lightseq: communication flies during blocks (default: prefetch)")
    _flag(group, "cp-inner-ring-size", int, None, "loongtrain: ranks of an inner ring (default: the most square)")
    text = "mesh: transfer times in blocks, from tools/profile_blocks.py (default: by size)"
    _flag(group, "cp-costs", str, None, text, metavar="FILE")
    _flag(group, "cp-attention-backend", str, "auto", "what computes a rank's blocks of attention", choices=BACKENDS)


def _data(group) -> None:
    text = "prefixes of .bin/.idx files from tools/preprocess_data.py, each with a weight before it or none"
    _flag(group, "data-path", str, None, text, nargs="+", metavar="PREFIX")
    _flag(group, "split", str, None, "shares of --data-path for training, validation and test (default: 969,30,1)")
    for split in ("train", "valid", "test"):
        text = f"like --data-path, for {split} alone; not with --data-path"
        _flag(group, f"{split}-data-path", str, None, text, nargs="+", metavar="PREFIX")
    _flag(
        group,
        "data-cache-path",
        str,
        None,
        "where sample indices are kept (default: cache/ beside the data)",
        metavar="DIR",
    )
    _flag(group, "seq-length", int, None, "tokens per sequence, over all context-parallel ranks; required")
    _flag(group, "tokenizer-type", str, "ByteLevelTokenizer", f"one of {', '.join(TOKENIZERS)}", metavar="NAME")
    _flag(group, "tokenizer-model", str, None, "SentencePiece file or HuggingFace folder", metavar="PATH")
    _flag(group, "vocab-size", int, None, "vocabulary before padding (default: the tokenizer's)")
    _flag(group, "num-workers", int, 2, "processes per rank that read data; 0: the rank itself")
    _switch(group, "eod-mask-loss", "no loss on end-of-document tokens")
    _switch(group, "reset-attention-mask", "tokens see only their own document, which an end-of-document token ends")
    _switch(group, "reset-position-ids", "positions of the position table start anew with each document")


def _validation(group) -> None:
    _flag(group, "eval-iters", int, 100, "global batches per evaluation; 0: none")
    _flag(group, "eval-interval", int, 1000, "iterations between evaluations")


def _logging(group) -> None:
    _flag(group, "log-interval", int, 100, "iterations between log lines")
    _flag(
        group, "tensorboard-dir", str, None, "TensorBoard files (default: SAVE/tensorboard with --save)", metavar="DIR"
    )
    _flag(group, "wandb-project", str, None, "Weights & Biases project; needs the package wandb")
    _flag(group, "wandb-exp-name", str, None, "Weights & Biases run name")
    _flag(group, "wandb-save-dir", str, None, "Weights & Biases files (default: the --save directory)", metavar="DIR")
    _flag(group, "peak-tflops", float, None, "peak TFLOP/s of a device, for MFU (default: known GPUs)")


def _always_on(group) -> None:
    for name, what in (
        ("use-mcore-models", "models are megatron-core's"),
        ("use-flash-attn", "attention never stores its score matrix"),
        ("calculate-per-token-loss", "the loss is a mean over the tokens of all ranks"),
        ("accumulate-allreduce-grads-in-fp32", "gradients are float32"),
        ("log-throughput", "every log line has TFLOP/s"),
    ):
        _switch(group, name, f"{what}, with or without this flag", default=True)


_GROUPS = {
    "model": _model,
    "regularization": _regularization,
    "training": _training,
    "learning rate": _learning_rate,
    "checkpointing": _checkpointing,
    "mixed precision": _mixed_precision,
    "distributed": _distributed,
    "context parallel": _context_parallel,
    "data": _data,
    "validation": _validation,
    "logging": _logging,
    "always on (accepted so that Megatron command lines run unchanged)": _always_on,
}
