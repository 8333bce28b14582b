"""Megatron-LM's flags that this project does not have: accepted flags without effect, and alternatives to others.

A flag is listed with its values: a word in capitals is any value, other words are the only accepted values, and dots
mean several values. A flag of Megatron-LM that is not in these lists is rejected as unknown.
"""

from megatron.context_parallel.cli.flag import ForeignFlag
from megatron.context_parallel.errors import UsageError

from .upstream_names import NAMES

_FUSED = "kernels are fused if this host supports it, which does not change the loss"
_COLLECTED = "Python's garbage collection is not changed"
_OVERLAP = "affects only speed; tensor-parallel communication is not overlapped"
_BUCKETS = "affects only speed; megatron-core's default buckets are used"
_STORED = "checkpoints are sharded over all ranks and written in parallel"
_LOGGED = "logs always contain losses, rates, gradient norm and memory"
_PROFILED = "traces contain what --use-pytorch-profiler records"

MEANS_NOTHING = {
    "--use-mcore-models": "models are always megatron-core's",
    "--use-flash-attn": "attention never stores its score matrix",
    "--attention-backend auto flash fused unfused local": "--cp-attention-backend selects the library for attention",
    "--attention-softmax-in-fp32": "the softmax is computed in float32",
    "--calculate-per-token-loss": "the loss is a mean over the tokens of all ranks",
    "--accumulate-allreduce-grads-in-fp32": "gradients are accumulated in float32",
    "--no-masked-softmax-fusion": _FUSED,
    "--no-bias-swiglu-fusion": _FUSED,
    "--no-bias-dropout-fusion": _FUSED,
    "--no-rope-fusion": _FUSED,
    "--moe-grouped-gemm": "experts are computed one after the other",
    "--moe-permute-fusion": _FUSED,
    "--no-persist-layer-norm": _FUSED,
    "--no-gradient-accumulation-fusion": _FUSED,
    "--cross-entropy-loss-fusion": _FUSED,
    "--cross-entropy-fusion-impl native te": _FUSED,
    "--no-create-attention-mask-in-dataloader": "the data loader creates no mask",
    "--no-mmap-bin-files": "the data files are memory-mapped, which gives the same tokens",
    "--tiktoken-pattern NAME": "its tokenizer is not supported; see --tokenizer-type for those that are",
    "--dataloader-type single": "samples are read in a single pass",
    "--manual-gc": _COLLECTED,
    "--manual-gc-interval N": _COLLECTED,
    "--no-manual-gc-eval": _COLLECTED,
    "--empty-unused-memory-level N": "the allocator keeps its memory",
    "--tp-comm-overlap": _OVERLAP,
    "--tp-comm-overlap-cfg FILE": _OVERLAP,
    "--no-async-tensor-model-parallel-allreduce": _OVERLAP,
    "--ddp-bucket-size N": _BUCKETS,
    "--ddp-num-buckets N": _BUCKETS,
    "--ddp-pad-buckets-for-high-nccl-busbw": _BUCKETS,
    "--optimizer adam": "the optimizer is Adam",
    "--override-opt_param-scheduler": "the flags determine the schedule, not the checkpoint",
    "--weight-decay-incr-style constant": "the weight decay is constant",
    "--check-for-nan-in-loss-and-grad": "losses and gradients are checked",
    "--use-dist-ckpt": _STORED,
    "--dist-ckpt-format torch_dist": _STORED,
    "--auto-detect-ckpt-format": _STORED,
    "--ckpt-fully-parallel-save": _STORED,
    "--ckpt-fully-parallel-load": _STORED,
    "--no-ckpt-fully-parallel-save": _STORED,
    "--ckpt-assume-constant-structure": _STORED,
    "--use-persistent-ckpt-worker": _STORED,
    "--recompute-modules core_attn...": "--recompute-granularity selective recomputes attention",
    "--log-throughput": "every log line contains TFLOP/s",
    "--log-params-norm": _LOGGED,
    "--log-num-zeros-in-grad": _LOGGED,
    "--log-progress": _LOGGED,
    "--log-straggler": _LOGGED,
    "--log-energy": _LOGGED,
    "--log-timers-to-tensorboard": _LOGGED,
    "--log-batch-size-to-tensorboard": _LOGGED,
    "--log-memory-to-tensorboard": _LOGGED,
    "--log-validation-ppl-to-tensorboard": _LOGGED,
    "--log-world-size-to-tensorboard": _LOGGED,
    "--no-log-learning-rate-to-tensorboard": _LOGGED,
    "--no-log-loss-scale-to-tensorboard": _LOGGED,
    "--tensorboard-log-interval N": _LOGGED,
    "--tensorboard-queue-size N": _LOGGED,
    "--timing-log-level N": _LOGGED,
    "--timing-log-option NAME": _LOGGED,
    "--no-barrier-with-level-1-timing": _LOGGED,
    "--logging-level N": _LOGGED,
    "--enable-one-logger": _LOGGED,
    "--no-one-logger": _LOGGED,
    "--record-memory-history": _PROFILED,
    "--memory-snapshot-path FILE": _PROFILED,
    "--pytorch-profiler-collect-shapes": _PROFILED,
    "--pytorch-profiler-collect-callstack": _PROFILED,
    "--pytorch-profiler-collect-chakra": _PROFILED,
}

_TOKENIZER = "give --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER, which contains the vocabulary files"
_CONSTANT = "the weight decay is constant; give --weight-decay"
_ROPE = "give --position-embedding-type rope"
_STATES = "the optimizer keeps float32 states on the device; leave it out"
_STAGES = "all pipeline stages have the same number of layers; leave it out"

GIVE_INSTEAD = {
    "--vocab-file FILE": _TOKENIZER,
    "--merge-file FILE": _TOKENIZER,
    "--data-args-path FILE": "give --data-path",
    "--per-split-data-args-path FILE": "give --train-data-path, --valid-data-path and --test-data-path",
    "--yaml-cfg FILE": "give --config FILE, with lines such as num-layers: 24",
    "--batch-size N": "give --micro-batch-size N",
    "--model-parallel-size N": "give --tensor-model-parallel-size N",
    "--warmup X": "give --lr-warmup-fraction X",
    "--step-batch-size-schedule STEPS": "give --rampup-batch-size START INCREMENT SAMPLES",
    "--decrease-batch-size-if-needed": "give a --global-batch-size that is divisible by the ranks",
    "--num-virtual-stages-per-pipeline-rank N": "give --num-layers-per-virtual-pipeline-stage",
    "--decoder-first-pipeline-num-layers N": _STAGES,
    "--decoder-last-pipeline-num-layers N": _STAGES,
    "--pipeline-model-parallel-layout STAGES": _STAGES,
    "--use-rotary-position-embeddings": _ROPE,
    "--no-position-embedding": _ROPE,
    "--rotary-interleaved": "RoPE rotates halves of a head, not interleaved pairs; leave it out",
    "--rotary-seq-len-interpolation-factor N": "positions are not interpolated; give --use-rope-scaling",
    "--squared-relu": "give --swiglu, or neither for GELU",
    "--openai-gelu": "GELU is megatron-core's; leave it out",
    "--apply-residual-connection-post-layernorm": "residuals are added before the norm; leave it out",
    "--apply-query-key-layer-scaling": "scores are not scaled by layer; leave it out",
    "--apply-layernorm-1p": "norm weights start at 1, not at 0 with 1 added; leave it out",
    "--init-method-xavier-uniform": "give --init-method-std",
    "--use-cpu-initialization": "weights are initialized on the device of the rank; leave it out",
    "--data-parallel-random-init": "data-parallel ranks start with the same weights; leave it out",
    "--use-tp-pp-dp-mapping": "ranks are in the order tp-cp-ep-dp-pp; leave it out",
    "--grad-reduce-in-bf16": "gradients are reduced in float32; leave it out",
    "--fp16-lm-cross-entropy": "the loss is computed in float32; leave it out",
    "--fp8-param-gather": "weights are gathered in bfloat16; leave it out",
    "--fp8-hybrid": "give --fp8-format hybrid",
    "--fp8-e4m3": "give --fp8-format e4m3",
    "--use-precision-aware-optimizer": _STATES,
    "--optimizer-cpu-offload": _STATES,
    "--main-grads-dtype NAME": _STATES,
    "--main-params-dtype NAME": _STATES,
    "--exp-avg-dtype NAME": _STATES,
    "--exp-avg-sq-dtype NAME": _STATES,
    "--start-weight-decay X": _CONSTANT,
    "--end-weight-decay X": _CONSTANT,
    "--lr-warmup-init X": "the warm-up starts from 0; leave it out",
    "--use-checkpoint-opt_param-scheduler": "the flags determine the schedule, not the checkpoint; leave it out",
    "--wandb-entity NAME": "set WANDB_ENTITY in the environment",
    "--expert-tensor-parallel-size N": "experts are not sharded by tensor parallelism; leave it out",
    "--moe-z-loss-coeff X": "the z-loss is not supported; give --moe-aux-loss-coeff",
    "--moe-expert-capacity-factor X": "tokens are never dropped; leave it out",
    "--moe-layer-freq N": "all layers have experts; leave it out",
    "--moe-router-enable-expert-bias": "give --moe-aux-loss-coeff",
    "--multi-latent-attention": "attention is multi-head or grouped-query; leave it out",
    "--mtp-num-layers N": "multi-token prediction is not supported; leave it out",
    "--fim-data": "fill-in-the-middle is not supported; leave it out",
    "--sft-tokenizer-prompt-format NAME": "--sft uses the chat template of --tokenizer-model; leave it out",
    "--hybrid-context-parallel": "all ranks of a context group share every sequence; give --cp-strategy",
}


def _read(usage: str, says: str, refused: bool) -> ForeignFlag:
    option, *values = usage.removesuffix("...").split()
    nargs = "+" if usage.endswith("...") else 1 if values else None
    return ForeignFlag(option, nargs, tuple(value for value in values if not value.isupper()), says, refused)


_NOTHING = [_read(usage, says, False) for usage, says in MEANS_NOTHING.items()]
_REFUSED = [_read(usage, says, True) for usage, says in GIVE_INSTEAD.items()]
_OTHERS = [ForeignFlag(f"--{name}", "*", (), "leave it out", True) for name in NAMES]
UPSTREAM = {flag.option: flag for flag in _OTHERS + _NOTHING + _REFUSED}


def refused(given: dict[str, list[str]]) -> list[UsageError]:
    """The errors for the `given` flags of Megatron-LM (values by option) that would change the result."""
    errors = []
    for option, values in given.items():
        flag = UPSTREAM[option]
        other = [value for value in values if flag.values and value not in flag.values]
        if flag.refused:
            written = " ".join([option, *values])
            errors.append(UsageError(f"{written}: a flag of Megatron-LM that is not supported; {flag.says}"))
        elif other:
            advice = f"give {option} {flag.values[0]}, or leave it out"
            errors.append(UsageError(f"{option} {other[0]}: not supported; {advice}"))
    return errors


def without_effect(given: dict[str, list[str]]) -> list[str]:
    """A header and a line for each of the `given` flags of Megatron-LM that are accepted without effect."""
    lines = [f"  {option}: {UPSTREAM[option].says}" for option in given if not UPSTREAM[option].refused]
    return ["these flags of Megatron-LM are accepted, but have no effect:", *lines] if lines else []
