"""The flags of the trainer, each declared once: Megatron's names, meanings and defaults."""

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.layer_list import layer_list_text
from megatron.context_parallel.cluster.step.train_config import SHARDING
from megatron.context_parallel.errors import UsageError

from .context_parallel_flags import ContextParallel
from .expert_flags import Experts
from .output_flags import Checkpointing, Logging, Profiling

if TYPE_CHECKING:
    import torch

    from megatron.context_parallel.cluster.description import Cluster
    from megatron.context_parallel.strategies import Choice

PRESETS = {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.yaml"))}
FULL = "recompute_granularity=full"
SPLIT = "969,30,1"
POSITIONS = ("learned_absolute", "rope", "yarn")
ROPE = "position_embedding_type=rope"
YARN = "position_embedding_type=yarn"
SOFTMAX = ("vanilla", "off-by-one", "learnable")
FP8_RECIPES = ("tensorwise", "delayed", "mxfp8", "blockwise")
IMPLEMENTATIONS = ("local", "transformer_engine")
DECAYS = ("constant", "linear", "cosine", "inverse-square-root")
# --tokenizer-type: (megatron-core's library, the Python package it needs)
TOKENIZERS = {
    "ByteLevelTokenizer": ("byte-level", None),
    "HuggingFaceTokenizer": ("huggingface", "transformers"),
    "SentencePieceTokenizer": ("sentencepiece", "sentencepiece"),
    "GPTSentencePieceTokenizer": ("sentencepiece", "sentencepiece"),
    "Llama2Tokenizer": ("sentencepiece", "sentencepiece"),
    "NullTokenizer": ("null", None),
}
weights = partial(flag, decides="weights")
model = partial(flag, decides="model")
data_order = partial(flag, decides="data order")


def read_gib(text: str) -> float:
    """GiB of a device's memory, from 80GB, 80GiB or 80. Vendors of GPUs write GB for GiB."""
    size = float(text.removesuffix("B").removesuffix("i").removesuffix("G"))
    if not 0 < size < math.inf:
        raise ValueError
    return size


def _shares(text: str) -> str:
    """`text`, if it contains up to three fractions, the first above 0."""
    text = text.strip("'\"")  # scripts may leave quotes
    try:
        first, *others = map(float, text.split(","))
        good = 0 < first < math.inf and len(others) < 3 and all(0 <= share < math.inf for share in others)
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"--split {text}: need up to three numbers, the first above 0, such as --split {SPLIT}")
    return text


class RunFlags(FlagSection, title="run"):
    """presets, files of flags, and dry runs"""

    preset: str | None = flag(f"shape of a published model: {', '.join(PRESETS)}", unit="NAME", choices=(*PRESETS,))
    config: str | None = flag("YAML file of flags; overrides --preset, overridden by the command line", unit="FILE")
    dry_run: bool = flag("check everything, print parallel layout, parameters and memory, and exit", False)
    device_memory: float | None = flag(
        "memory of a GPU, such as 80GB: the dry run says whether the run fits, and else what would make it fit",
        derived="that of --cp-cluster",
        read=read_gib,
        example="80GB",
        needs="dry_run",
    )
    longest: bool = flag("describe the run with the longest sequence that fits the device", False, needs="dry_run")


class ModelFlags(FlagSection, title="model"):
    """the shape of the model"""

    num_layers: int = weights("number of transformer layers", example=24, at_most=10_000)
    hidden_size: int = weights("model width", example=1024)
    ffn_hidden_size: int = weights("MLP width", derived="4 hidden-size; with --swiglu 2/3 of it, in 64s", example=4096)
    num_attention_heads: int = weights("number of query heads", example=16)
    kv_channels: int = weights("width of a head", derived="hidden-size / num-attention-heads", example=128)
    group_query_attention: bool = flag("let groups of query heads share a key/value head", False)
    num_query_groups: int = weights(
        "key/value heads", derived="1", example=8, needs="group_query_attention", divides="num_attention_heads"
    )
    max_position_embeddings: int = flag(
        "number of rows of the position table", derived="seq-length", example=2048, decides="position table"
    )
    position_embedding_type: str = weights("kind of position embedding", "learned_absolute", choices=POSITIONS)
    rotary_base: int = model("base of the rotary frequencies", 10000)
    rotary_percent: float = weights("fraction of each head that RoPE rotates", 1.0, at_most=1)
    use_rope_scaling: bool = model(
        "scale down the low rotary frequencies for long sequences, as in Llama 3", False, excludes=YARN
    )
    rope_scaling_factor: float = model("scaling factor of --use-rope-scaling", 8.0, needs="use_rope_scaling")
    rotary_seq_len_interpolation_factor: float = model("divide positions by this", 1.0, example=8.0, needs=ROPE)
    rotary_base_of_windows: int | None = model(
        "rotary base of the layers with a window; positions are not divided there",
        derived="rotary-base",
        example=10000,
        needs=f"window_size {ROPE}",
    )
    rotary_scaling_factor: float = model("factor by which YaRN extends sequences", 1.0, at_least=1, needs=YARN)
    yarn_original_max_position_embeddings: int = model(
        "tokens of a sequence before YaRN extended it", 4096, example=32768, needs=YARN
    )
    yarn_beta_fast: float = model("frequencies with more turns in these tokens are kept by YaRN", 32.0, needs=YARN)
    yarn_beta_slow: float = model("frequencies with fewer turns are divided by YaRN's factor", 1.0, needs=YARN)
    yarn_correction_range_round_to_int: bool = model(
        "let the dimensions between the two begin and end at fractions",
        True,
        option="--no-yarn-correction-range-round-to-int",
        needs=YARN,
    )
    mscale: float = model(
        "YaRN multiplies rotated queries and keys by 0.1 MSCALE log(factor) + 1", 1.0, at_least=0, needs=YARN
    )
    mscale_all_dim: float = model("and divides them by the same of this number", 0.0, at_least=0, needs=YARN)
    normalization: str = weights("kind of normalization layers", "LayerNorm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = weights("epsilon of the normalization layers", 1e-5)
    apply_layernorm_1p: bool = weights("add 1 to the weights of normalization layers, which start at 0", False)
    sandwich_norm: bool = weights("also normalize the outputs of attention and MLP", False)
    scale_embeddings: bool = model("multiply the embeddings of tokens by sqrt(hidden-size)", False)
    window_size: tuple[int, int] | None = model(
        "tokens that each token sees before and after it; -1: all",
        at_least=-1,
        derived="all",
        unit="BEFORE,AFTER",
        example=(4096, 0),
    )
    window_attn_skip_freq: str | None = model(
        "layers with a window: all but every N-th, or a list with 1 for a window, such as [1,1,0] or [1]*5+[0]",
        derived="all",
        unit="N|LIST",
        read=layer_list_text,
        example="2",
        needs="window_size",
    )
    softmax_scale: float | None = model("factor of the scores", derived="1 / sqrt(kv-channels)", example=0.0625)
    softmax_type: str = weights("extra score per head: none, 0, or learned (a sink)", "vanilla", choices=SOFTMAX)
    qk_layernorm: bool = weights("normalize queries and keys in each head", False)
    swiglu: bool = weights("use gated linear units with SiLU instead of GELU", False)
    fast_geglu: bool = weights(
        "use gated linear units with the tanh approximation of GELU", False, excludes="swiglu quick_geglu"
    )
    quick_geglu: bool = weights("use gated linear units with x sigmoid(1.702 x)", False, excludes="swiglu")
    glu_linear_offset: float = model(
        "number that is added to the linear half of --quick-geglu", 0.0, example=1.0, needs="quick_geglu"
    )
    activation_func_clamp_value: float | None = model(
        "largest input of --quick-geglu; the linear half is clamped on both sides", example=7.0, needs="quick_geglu"
    )
    bias_gelu_fusion: bool = flag(
        "compute GELU and its bias in two kernels on GPUs; the fused kernel uses the tanh approximation",
        True,
        option="--no-bias-gelu-fusion",
    )
    add_bias_linear: bool = weights("remove the biases of linear layers", True, option="--disable-bias-linear")
    add_qkv_bias: bool = weights("keep biases in the query/key/value projection with --disable-bias-linear", False)
    untie_embeddings_and_output_weights: bool = weights("use separate weights for the output layer", False)
    make_vocab_size_divisible_by: int = flag(
        "pad the vocabulary to a multiple of this times tensor ranks; the loss stays the same", 128
    )
    init_method_std: float = flag("standard deviation of the initial weights", 0.02)
    transformer_impl: str = flag(
        "linear layers and norms", derived="transformer_engine if installed, else local", choices=IMPLEMENTATIONS
    )


class Regularization(FlagSection, title="regularization"):
    """dropout, weight decay and Adam"""

    attention_dropout: float = flag("only 0 is accepted; Megatron's default is 0.1", 0.0, at_least=0, below=1)
    hidden_dropout: float = flag("dropout of the residual stream; Megatron's default is 0.1", 0.0, at_least=0, below=1)
    weight_decay: float = flag("decoupled (AdamW) weight decay", 0.01, at_least=0)
    clip_grad: float = flag("maximum norm of the gradient; 0: no limit", 1.0, at_least=0)
    adam_beta1: float = flag("decay rate of the first moment", 0.9, at_least=0, below=1)
    adam_beta2: float = flag("decay rate of the second moment", 0.999, at_least=0, below=1, example=0.95)
    adam_eps: float = flag("constant added to Adam's denominator", 1e-8)


class Training(FlagSection, title="training"):
    """batches, length of the run, recomputation"""

    micro_batch_size: int = flag("number of sequences per forward pass and data-parallel rank")
    global_batch_size: int = flag(
        "number of sequences per update",
        derived="a micro batch per data-parallel rank",
        example=8,
        multiple_of="micro_batch_size data_parallel_size interleaved_stages",
    )
    rampup_batch_size: list[int] | None = data_order(
        "grow the batch from START sequences, by INCREMENT, to --global-batch-size, over SAMPLES samples",
        unit="START INCREMENT SAMPLES",
        example=[16, 8, 300000],
        needs="train_samples",
    )
    train_iters: int = flag("updates", to_train=True, example=1000, excludes="train_samples")
    train_samples: int | None = flag("number of sequences to train on, in whole global batches", example=100000)
    exit_interval: int | None = flag("save and exit after an iteration that is a multiple of this", example=100)
    exit_duration_in_mins: int | None = flag("save and exit after this time", unit="MINUTES", example=230)
    exit_signal_handler: bool = flag("save and exit on SIGTERM", False)
    check_for_nan_in_loss_and_grad: bool = flag(
        "continue if a loss or gradient is not finite", True, option="--no-check-for-nan-in-loss-and-grad"
    )
    check_for_spiky_loss: bool = flag("warn if a loss is at least 10 times the largest of the first 100", False)
    rerun_mode: str = flag(
        "validate_results: repeat a step with a loss or gradient that is not finite or spiky, to find faulty devices",
        "disabled",
        choices=("disabled", "validate_results", "report_stats"),
    )
    seed: int = data_order("random seed of weights, data order and dropout", 1234)
    recompute_granularity: str | None = flag(
        "recompute parts of layers, or whole layers", choices=("selective", "full")
    )
    recompute_modules: list[str] | None = flag(
        "the parts of layers that selective recomputation computes again",
        derived="core_attn",
        unit="NAME",
        choices=("core_attn", "mlp", "layernorm", "moe", "shared_experts"),
    )
    recompute_method: str | None = flag(
        "recompute groups of layers, or the first", choices=("uniform", "block"), needs=FULL
    )
    recompute_num_layers: int | None = flag(
        "layers per group, or of the first", needs=FULL, not_above="layers_of_a_virtual_stage"
    )
    recompute_whitelist: list[str] | None = flag(
        "modules to save instead of recomputing (Selective Checkpoint++)",
        unit="NAME",
        choices=("core_attention", "qkv", "proj", "fc1", "fc2", "norms"),
        needs=FULL,
    )
    offload_checkpoints: bool = flag(
        "keep the inputs of recomputed layers in host memory", False, needs=FULL, excludes="fp8"
    )
    offload_kept: bool = flag(
        "keep what --recompute-whitelist saves in host memory", False, needs="recompute_whitelist"
    )
    fine_grained_activation_offloading: bool = flag(
        "keep what Transformer Engine's layers save in --offload-modules in host memory",
        False,
        needs="offload_modules",
        excludes=f"{FULL} fp8 rampup_batch_size use_megatron_fsdp use_torch_fsdp2",
    )
    offload_modules: list[str] | None = flag(
        "parts of layers whose inputs are in host memory",
        unit="NAME",
        choices=("qkv_linear", "core_attn", "attn_proj"),
        needs="fine_grained_activation_offloading",
    )
    min_offloaded_tensor_size: int = flag(
        "numbers of the smallest tensor that is moved to host memory", 2**20, needs="fine_grained_activation_offloading"
    )
    recompute_activations: bool = flag("the same as --recompute-granularity selective", False, excludes=FULL)
    mlp_chunks_for_training: int | None = flag(
        "parts of the tokens that an MLP computes in turn, and again in the backward pass",
        derived="1; where it is computed again anyway, parts of at most 512 MiB",
        example=8,
        excludes="num_experts fp8",
    )
    cross_entropy_chunk_size: int = flag(
        "tokens whose logits exist at once", derived="64 MiB of logits on a rank, or 512 tokens", example=1024
    )


class LearningRate(FlagSection, title="learning rate"):
    """the schedule of the learning rate"""

    lr: float = flag("maximum learning rate", example=3e-4, to_train=True)
    lr_decay_style: str = flag("shape of the decay", "linear", choices=DECAYS)
    lr_decay_iters: int | None = flag("updates until --min-lr", derived="all", example=1000, excludes="train_samples")
    lr_decay_samples: int | None = flag("--lr-decay-iters in sequences", example=100000, needs="train_samples")
    lr_warmup_iters: int = flag("number of updates of linear warm-up from 0", 0, at_least=0, excludes="train_samples")
    lr_warmup_samples: int = flag("--lr-warmup-iters in sequences", 0, at_least=0, example=10000, needs="train_samples")
    lr_warmup_fraction: float | None = flag(
        "warm-up as a fraction of the decay",
        at_least=0,
        below=1,
        example=0.01,
        excludes="lr_warmup_iters lr_warmup_samples",
    )
    min_lr: float = flag("minimum learning rate", 0.0, at_least=0, not_above="lr")
    decoupled_lr: float | None = flag("--lr of the embedding and the output layer", derived="lr", example=3e-4)
    decoupled_min_lr: float | None = flag(
        "minimum of --decoupled-lr",
        derived="min-lr",
        example=1e-5,
        at_least=0,
        needs="decoupled_lr",
        not_above="decoupled_lr",
    )


class MixedPrecision(FlagSection, title="mixed precision"):
    """16-bit and FP8 formats, scaling of the loss"""

    bf16: bool = flag("use bfloat16 weights and activations, with gradients and optimizer in float32", False)
    fp16: bool = flag("use float16 like --bf16, on GPUs", False, excludes="bf16")
    fp8: str | None = flag(
        "run Transformer Engine's linear layers in this FP8 format; hybrid: gradients in e5m2",
        option="--fp8-format",
        choices=("e4m3", "hybrid"),
        excludes="recompute_whitelist",
    )
    fp8_recipe: str = flag("FP8 scaling recipe", "delayed", choices=FP8_RECIPES, needs="fp8")
    fp8_amax_history_len: int = flag("number of steps whose largest values determine an FP8 scale", 1, needs="fp8")
    fp8_amax_compute_algo: str = flag(
        "which of these determines it", "most_recent", choices=("most_recent", "max"), needs="fp8"
    )
    loss_scale: float | None = flag("constant loss scale", derived="dynamic", example=65536, needs="fp16")
    initial_loss_scale: float = flag("initial dynamic loss scale, with --fp16", 2**32)
    min_loss_scale: float = flag("minimum dynamic loss scale, with --fp16", 1.0)
    loss_scale_window: float = flag("number of iterations before the loss scale is raised, with --fp16", 1000)
    hysteresis: int = flag("number of overflows before the loss scale is lowered, with --fp16", 2)


class Distributed(FlagSection, title="distributed"):
    """tensor and pipeline parallelism, sharding of optimizer and weights, time limits"""

    tensor_model_parallel_size: int = flag(
        "number of ranks that split every layer", 1, example=2, divides="num_attention_heads ffn_hidden_size"
    )
    pipeline_model_parallel_size: int = flag("number of pipeline stages", 1, example=2, divides="num_layers")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        "layers per virtual pipeline stage", needs="pipeline_model_parallel_size", divides="layers_of_a_stage"
    )
    sequence_parallel: bool = flag("also split norms and residuals; off with one tensor-parallel rank", False)
    use_distributed_optimizer: bool = flag("shard the optimizer over data and context ranks (ZeRO 1)", False)
    optimizer_cpu_offload: bool = flag(
        "keep and update the optimizer in host memory; with FSDP2 also the shards of weights and gradients",
        False,
        excludes="use_megatron_fsdp",
    )
    use_precision_aware_optimizer: bool = flag(
        "let the optimizer keep the float32 weights", False, needs="optimizer_cpu_offload use_distributed_optimizer"
    )
    optimizer_offload_fraction: float = flag(
        "share of the parameters whose optimizer is in host memory", 1.0, at_most=1, needs="optimizer_cpu_offload"
    )
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        "copy gradients and weights of some parameters while others are updated", False, needs="optimizer_cpu_offload"
    )
    num_distributed_optimizer_instances: int = flag(
        "number of copies of the sharded state; each is sharded over data x context ranks / this", 1, example=2
    )
    use_megatron_fsdp: bool = flag("use Megatron-FSDP, with --data-parallel-sharding-strategy", False)
    data_parallel_sharding_strategy: str = flag(
        "what to shard: optimizer (ZeRO 1), also gradients (ZeRO 2), also weights (ZeRO 3)",
        "no_shard",
        choices=SHARDING,
        example="optim_grads_params",
        needs="use_megatron_fsdp",
    )
    outer_dp_sharding_strategy: str = flag(
        "sharding between optimizer instances; only no_shard is supported",
        "no_shard",
        choices=("no_shard", "optim"),
        needs="use_megatron_fsdp",
    )
    use_torch_fsdp2: bool = flag(
        "shard optimizer, gradients and weights with PyTorch's FSDP2",
        False,
        excludes="use_megatron_fsdp use_distributed_optimizer",
    )
    overlap_grad_reduce: bool = flag("reduce gradients during the backward pass", False)
    overlap_param_gather: bool = flag(
        "gather sharded weights during the forward pass", False, needs="use_distributed_optimizer overlap_grad_reduce"
    )
    distributed_backend: str | None = flag(
        "communication backend", derived="nccl on GPUs, else gloo", choices=("gloo", "nccl")
    )
    distributed_timeout_minutes: int = flag("time limit for a rank to wait for another", 10, unit="MINUTES")
    distributed_timeout_seconds_after_init: int | None = flag(
        "end the job if a rank does not respond for so long, after the first iteration",
        derived="distributed-timeout-minutes",
        unit="SECONDS",
        example=60,
        at_least=2,
    )
    high_priority_stream_groups: list[str] | None = flag(
        "groups whose NCCL kernels have high priority", choices=("cp", "dp_cp", "pp", "tp")
    )
    nccl_communicator_config_path: str | None = flag("YAML file with NCCL options by group", unit="FILE")


class Data(FlagSection, title="data"):
    """files, tokenizer and order of the tokens"""

    data_path: list[str] | None = data_order(
        "prefixes of .bin/.idx files from tools/preprocess_data.py, or chats of --sft, optionally each after a weight; "
        "several without weights are read once",
        unit="PREFIX",
    )
    mock_data: bool = data_order("train on generated documents of tokens 1, 2, 3, ...", False, excludes="data_path")
    split: str | None = data_order(
        "fractions of the documents for training, validation and test",
        derived=SPLIT,
        example=SPLIT,
        read=_shares,
        unit="SHARES",
        excludes="train_data_path",
    )
    train_data_path: list[str] | None = data_order(
        "--data-path for training", unit="PREFIX", excludes="data_path mock_data"
    )
    valid_data_path: list[str] | None = flag("--data-path for validation", unit="PREFIX", needs="train_data_path")
    test_data_path: list[str] | None = flag("--data-path for testing", unit="PREFIX", needs="train_data_path")
    data_cache_path: str | None = flag("cache of sample indices", derived="cache/ beside the data", unit="DIR")
    seq_length: int = data_order(
        "tokens per sequence, over all context-parallel ranks", example=2048, not_above="max_position_embeddings"
    )
    tokenizer_type: str = model("kind of tokenizer", "ByteLevelTokenizer", choices=(*TOKENIZERS,))
    tokenizer_model: str | None = flag("SentencePiece file or HuggingFace folder", unit="PATH")
    vocab_size: int = weights("size of the vocabulary, before padding", derived="the tokenizer's", example=32000)
    num_workers: int = flag("number of processes per rank that read data; 0: the rank reads itself", 2, at_least=0)
    sft: bool = data_order(
        "fine-tune on chats: JSON lines with messages in the files of --data-path; only the answers are learned",
        False,
        needs="tokenizer_type=HuggingFaceTokenizer",
        excludes="mock_data eod_mask_loss pack_documents",
    )
    pack_documents: bool = data_order(
        "pack whole documents into sequences by best fit; each is trained on as if it were alone",
        False,
        excludes="mock_data eod_mask_loss",
    )
    eod_mask_loss: bool = model("exclude end-of-document tokens from the loss", False)
    reset_attention_mask: bool = model("restrict attention to documents, which end-of-document tokens separate", False)
    reset_position_ids: bool = model("restart the positions of the position table in each document", False)


class Flags(
    RunFlags,
    ModelFlags,
    Experts,
    Regularization,
    Training,
    LearningRate,
    Checkpointing,
    MixedPrecision,
    Distributed,
    ContextParallel,
    Data,
    Logging,
    Profiling,
):
    """The flags of a run. Flags with a derived default are None until it is filled in."""


class Arguments(Flags):
    """The complete flags of a run, and values derived from them.

    In a dry run, `lr` and `train_iters` are 0 if not given.
    """

    world_size: int
    rank: int
    data_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None  # None: the pipeline is not interleaved
    params_dtype: "torch.dtype"
    cp_layers: "tuple[Choice, ...]"  # of each layer; empty with --cp-strategy auto, until the job has started
    cp_measured: "Cluster | None"  # what --cp-strategy auto measured, if it places documents
    eod_token: int | None  # None: the tokenizer has none
    vocabulary: int  # the number of token ids of the model: vocab_size, with NullTokenizer one more
    padded_vocab_size: int  # rows of the embedding; rows beyond the vocabulary do not affect the loss

    @property
    def layers_of_a_stage(self) -> int:
        return self.num_layers // self.pipeline_model_parallel_size

    @property
    def layers_of_a_virtual_stage(self) -> int:
        return self.layers_of_a_stage // (self.virtual_pipeline_model_parallel_size or 1)

    @property
    def interleaved_stages(self) -> int:
        return self.pipeline_model_parallel_size if self.virtual_pipeline_model_parallel_size else 1


FLAGS = Flags.declared
