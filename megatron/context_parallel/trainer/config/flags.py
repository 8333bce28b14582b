"""The flags of the trainer, each declared once: Megatron's names, meanings and defaults."""

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.context_parallel.cli.flag import FlagSection, flag

from .context_parallel_flags import ContextParallel
from .expert_flags import Experts
from .output_flags import Checkpointing, Logging, Profiling

if TYPE_CHECKING:
    import torch

    from megatron.context_parallel.strategies import Choice

PRESETS = {path.stem: path for path in sorted((Path(__file__).parent / "presets").glob("*.yaml"))}
FULL = "recompute_granularity=full"
SPLIT = "969,30,1"
POSITIONS = ("learned_absolute", "rope")
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


def _shares(text: str) -> str:
    """`text`, if it gives up to three shares, the first above 0."""
    text = text.strip("'\"")  # which scripts leave there
    first, *others = map(float, text.split(","))
    if not (0 < first < math.inf and len(others) < 3 and all(0 <= share < math.inf for share in others)):
        raise ValueError
    return text


class RunFlags(FlagSection, title="run"):
    """where flags come from, and whether to train"""

    preset: str | None = flag(f"shape of a published model: {', '.join(PRESETS)}", unit="NAME", choices=(*PRESETS,))
    config: str | None = flag("YAML file of flags, which win over --preset and lose to the command line", unit="FILE")
    dry_run: bool = flag("check everything, print parallel layout, parameters and memory, and stop", False)


class ModelFlags(FlagSection, title="model"):
    """the shape of the model"""

    num_layers: int = weights("transformer layers", example=24, at_most=10_000)
    hidden_size: int = weights("model width", example=1024)
    ffn_hidden_size: int = weights("MLP width", derived="4 hidden-size; with --swiglu 2/3 of it, in 64s", example=4096)
    num_attention_heads: int = weights("query heads", example=16)
    kv_channels: int = weights("width of a head", derived="hidden-size / num-attention-heads", example=128)
    group_query_attention: bool = flag("query heads share key/value heads", False)
    num_query_groups: int = weights(
        "key/value heads", derived="1", example=8, needs="group_query_attention", divides="num_attention_heads"
    )
    max_position_embeddings: int = flag(
        "rows for positions", derived="seq-length", example=2048, decides="position table"
    )
    position_embedding_type: str = weights("how positions enter", "learned_absolute", choices=POSITIONS)
    rotary_base: int = model("base of the rotary frequencies", 10000)
    rotary_percent: float = weights("part of each head that rotates", 1.0, at_most=1)
    use_rope_scaling: bool = model("slow the low rotary frequencies down for long sequences, as Llama 3 does", False)
    rope_scaling_factor: float = model("how much", 8.0, needs="use_rope_scaling")
    normalization: str = weights("normalization layers", "LayerNorm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = weights("epsilon of the normalization layers", 1e-5)
    window_size: tuple[int, int] | None = model(
        "tokens seen before and after each; -1: all", at_least=-1, derived="all", unit="BEFORE,AFTER", example=(4096, 0)
    )
    softmax_type: str = weights("one more score per head: none, 0, or learned (a sink)", "vanilla", choices=SOFTMAX)
    qk_layernorm: bool = weights("normalize queries and keys in each head", False)
    swiglu: bool = weights("gated linear units with SiLU instead of GELU", False)
    bias_gelu_fusion: bool = flag(
        "on GPUs, GELU and its bias in two kernels; the fused one approximates by tanh",
        True,
        option="--no-bias-gelu-fusion",
    )
    add_bias_linear: bool = weights("no biases in linear layers", True, option="--disable-bias-linear")
    add_qkv_bias: bool = weights("biases in the query/key/value projection even with --disable-bias-linear", False)
    untie_embeddings_and_output_weights: bool = weights("an output layer of its own", False)
    make_vocab_size_divisible_by: int = flag(
        "pad the vocabulary to a multiple of this times tensor ranks; the loss does not depend on it", 128
    )
    init_method_std: float = flag("standard deviation of the initial weights", 0.02)
    transformer_impl: str = flag(
        "linears and norms", derived="transformer_engine where it can be imported, else local", choices=IMPLEMENTATIONS
    )


class Regularization(FlagSection, title="regularization"):
    """dropout, weight decay and Adam"""

    attention_dropout: float = flag("only 0 is accepted; Megatron's default is 0.1", 0.0, at_least=0, below=1)
    hidden_dropout: float = flag("dropout of the residual stream; Megatron's default is 0.1", 0.0, at_least=0, below=1)
    weight_decay: float = flag("decoupled (AdamW) weight decay", 0.01, at_least=0)
    clip_grad: float = flag("largest norm of the gradient; 0: no limit", 1.0, at_least=0)
    adam_beta1: float = flag("decay of the mean gradient", 0.9, at_least=0, below=1)
    adam_beta2: float = flag("decay of the mean squared gradient", 0.999, at_least=0, below=1, example=0.95)
    adam_eps: float = flag("added to Adam's denominator", 1e-8)


class Training(FlagSection, title="training"):
    """batches, length of the run, recomputation"""

    micro_batch_size: int = flag("sequences per forward pass and data-parallel rank")
    global_batch_size: int = flag(
        "sequences per update",
        derived="a micro batch per data-parallel rank",
        example=8,
        multiple_of="micro_batch_size data_parallel_size interleaved_stages",
    )
    rampup_batch_size: list[int] | None = data_order(
        "grow to --global-batch-size: from so many sequences, by so many, over so many samples",
        unit="START INCREMENT SAMPLES",
        example=[16, 8, 300000],
        needs="train_samples",
    )
    train_iters: int = flag("updates", to_train=True, example=1000, excludes="train_samples")
    train_samples: int | None = flag("sequences to train on, in whole global batches", example=100000)
    exit_interval: int | None = flag("save and leave after an iteration that is a multiple of this", example=100)
    exit_duration_in_mins: int | None = flag("save and leave after this time", unit="MINUTES", example=230)
    exit_signal_handler: bool = flag("save and leave on SIGTERM", False)
    check_for_nan_in_loss_and_grad: bool = flag(
        "go on when a loss or gradient is not finite", True, option="--no-check-for-nan-in-loss-and-grad"
    )
    check_for_spiky_loss: bool = flag("a line when a loss is 10 times the largest of the first 100 or more", False)
    rerun_mode: str = flag(
        "validate_results: compute a step again whose loss or gradient is not finite or spiky, to find faulty devices",
        "disabled",
        choices=("disabled", "validate_results", "report_stats"),
    )
    seed: int = data_order("seed of weights, data order and dropout", 1234)
    recompute_granularity: str | None = flag("recompute attention, or whole layers", choices=("selective", "full"))
    recompute_method: str | None = flag("groups of layers, or the first", choices=("uniform", "block"), needs=FULL)
    recompute_num_layers: int | None = flag("layers per group, or the first", needs=FULL, not_above="layers_of_a_turn")
    recompute_whitelist: list[str] | None = flag(
        "kept instead, output and all (Selective Checkpoint++)", unit="NAME", choices=("core_attention",), needs=FULL
    )
    recompute_activations: bool = flag("the same as --recompute-granularity selective", False, excludes=FULL)


class LearningRate(FlagSection, title="learning rate"):
    """the schedule of the learning rate"""

    lr: float = flag("largest learning rate", example=3e-4, to_train=True)
    lr_decay_style: str = flag("shape of the decay", "linear", choices=DECAYS)
    lr_decay_iters: int | None = flag("updates until --min-lr", derived="all", example=1000, excludes="train_samples")
    lr_decay_samples: int | None = flag("the same in sequences", example=100000, needs="train_samples")
    lr_warmup_iters: int = flag("updates of linear warm-up from 0", 0, at_least=0, excludes="train_samples")
    lr_warmup_samples: int = flag("the same in sequences", 0, at_least=0, example=10000, needs="train_samples")
    lr_warmup_fraction: float | None = flag(
        "warm-up as part of the decay", at_least=0, below=1, example=0.01, excludes="lr_warmup_iters lr_warmup_samples"
    )
    min_lr: float = flag("smallest learning rate", 0.0, at_least=0, not_above="lr")
    decoupled_lr: float | None = flag("--lr of the embedding and the output layer", derived="lr", example=3e-4)
    decoupled_min_lr: float | None = flag(
        "their --min-lr", derived="min-lr", example=1e-5, at_least=0, needs="decoupled_lr", not_above="decoupled_lr"
    )


class MixedPrecision(FlagSection, title="mixed precision"):
    """16-bit and FP8 formats, scaling of the loss"""

    bf16: bool = flag("bfloat16 weights and activations; gradients and optimizer in float32", False)
    fp16: bool = flag("like --bf16 in float16, on GPUs", False, excludes="bf16")
    fp8: str | None = flag(
        "linears in FP8 by Transformer Engine; hybrid: gradients in e5m2",
        option="--fp8-format",
        choices=("e4m3", "hybrid"),
        excludes="recompute_whitelist",
    )
    fp8_recipe: str = flag("how FP8 is scaled", "delayed", choices=FP8_RECIPES, needs="fp8")
    fp8_amax_history_len: int = flag("steps whose largest values decide a scale", 1, needs="fp8")
    fp8_amax_compute_algo: str = flag("which of them", "most_recent", choices=("most_recent", "max"), needs="fp8")
    loss_scale: float | None = flag("a constant loss scale", derived="dynamic", example=65536, needs="fp16")
    initial_loss_scale: float = flag("fp16: first dynamic loss scale", 2**32)
    min_loss_scale: float = flag("fp16: smallest dynamic loss scale", 1.0)
    loss_scale_window: float = flag("fp16: iterations before the loss scale is raised", 1000)
    hysteresis: int = flag("fp16: overflows before the loss scale is lowered", 2)


class Distributed(FlagSection, title="distributed"):
    """ranks that split layers, pipeline, optimizer and weights; time limits"""

    tensor_model_parallel_size: int = flag(
        "ranks that split every layer", 1, example=2, divides="num_attention_heads ffn_hidden_size"
    )
    pipeline_model_parallel_size: int = flag("ranks that split the layers", 1, example=2, divides="num_layers")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        "layers per turn of an interleaved pipeline", needs="pipeline_model_parallel_size", divides="layers_of_a_stage"
    )
    sequence_parallel: bool = flag("split norms and residuals too; off with one tensor-parallel rank", False)
    use_distributed_optimizer: bool = flag("shard it over data and context ranks (ZeRO 1)", False)
    num_distributed_optimizer_instances: int = flag(
        "copies of what is sharded: each is shared by data x context ranks / this", 1, example=2
    )
    use_megatron_fsdp: bool = flag("share out what --data-parallel-sharding-strategy says", False)
    data_parallel_sharding_strategy: str = flag(
        "optimizer (ZeRO 1), gradients too (ZeRO 2), weights too (ZeRO 3)",
        "no_shard",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
        example="optim_grads_params",
        needs="use_megatron_fsdp",
    )
    outer_dp_sharding_strategy: str = flag(
        "what the instances share out; only no_shard is accepted",
        "no_shard",
        choices=("no_shard", "optim"),
        needs="use_megatron_fsdp",
    )
    use_torch_fsdp2: bool = flag(
        "share out optimizer, gradients and weights with PyTorch's FSDP2",
        False,
        excludes="use_megatron_fsdp use_distributed_optimizer",
    )
    overlap_grad_reduce: bool = flag("reduce gradients during the backward pass", False)
    overlap_param_gather: bool = flag(
        "gather sharded weights during the forward pass", False, needs="use_distributed_optimizer overlap_grad_reduce"
    )
    distributed_backend: str | None = flag("communication", derived="nccl on GPUs, else gloo", choices=("gloo", "nccl"))
    distributed_timeout_minutes: int = flag("a rank that waits longer fails", 10, unit="MINUTES")
    distributed_timeout_seconds_after_init: int | None = flag(
        "a rank that does not respond so long ends the job, after the first iteration",
        derived="distributed-timeout-minutes",
        unit="SECONDS",
        example=60,
        at_least=2,
    )
    high_priority_stream_groups: list[str] | None = flag(
        "groups whose NCCL kernels go before others", choices=("cp", "dp_cp", "pp", "tp")
    )
    nccl_communicator_config_path: str | None = flag("YAML with NCCL's options of such groups", unit="FILE")


class Data(FlagSection, title="data"):
    """files, tokenizer and order of the tokens"""

    data_path: list[str] | None = data_order(
        "prefixes of .bin/.idx files from tools/preprocess_data.py, each with a weight before it or none", unit="PREFIX"
    )
    mock_data: bool = data_order("train on made-up documents of any length: 1, 2, 3, ...", False, excludes="data_path")
    split: str | None = data_order(
        "for training, validation, test",
        derived=SPLIT,
        example=SPLIT,
        read=_shares,
        unit="SHARES",
        excludes="train_data_path",
    )
    train_data_path: list[str] | None = data_order(
        "--data-path of training", unit="PREFIX", excludes="data_path mock_data"
    )
    valid_data_path: list[str] | None = flag("--data-path of validation", unit="PREFIX", needs="train_data_path")
    test_data_path: list[str] | None = flag("--data-path of testing", unit="PREFIX", needs="train_data_path")
    data_cache_path: str | None = flag("where sample indices are kept", derived="cache/ beside the data", unit="DIR")
    seq_length: int = data_order(
        "tokens per sequence, over all context-parallel ranks", example=2048, not_above="max_position_embeddings"
    )
    tokenizer_type: str = model("what makes tokens of text", "ByteLevelTokenizer", choices=(*TOKENIZERS,))
    tokenizer_model: str | None = flag("SentencePiece file or HuggingFace folder", unit="PATH")
    vocab_size: int = weights("vocabulary before padding", derived="the tokenizer's", example=32000)
    num_workers: int = flag("processes per rank that read data; 0: the rank itself", 2, at_least=0)
    eod_mask_loss: bool = model("no loss on end-of-document tokens", False)
    reset_attention_mask: bool = model("tokens see only their own document, up to its end-of-document token", False)
    reset_position_ids: bool = model("positions of the position table start anew with each document", False)


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
    """The flags of a run. Those with a derived default are None as given and have their types once it is filled in."""


class Arguments(Flags):
    """The flags of a run, complete, and what follows from them.

    A dry run that is not told `lr` or `train_iters` has 0 there.
    """

    world_size: int
    rank: int
    data_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None  # None: the pipeline is not interleaved
    params_dtype: "torch.dtype"
    cp_layers: "tuple[Choice, ...]"  # of each layer; empty: --cp-strategy auto, until the job has begun
    eod_token: int | None  # None: the tokenizer has none
    vocabulary: int  # token ids that the model knows: vocab_size, with NullTokenizer one more
    padded_vocab_size: int  # rows of the embedding; those beyond the vocabulary have no part in the loss

    @property
    def layers_of_a_stage(self) -> int:
        return self.num_layers // self.pipeline_model_parallel_size

    @property
    def layers_of_a_turn(self) -> int:
        return self.layers_of_a_stage // (self.virtual_pipeline_model_parallel_size or 1)

    @property
    def interleaved_stages(self) -> int:
        return self.pipeline_model_parallel_size if self.virtual_pipeline_model_parallel_size else 1


FLAGS = Flags.declared
