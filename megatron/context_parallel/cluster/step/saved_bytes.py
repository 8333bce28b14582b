"""What each part of a model keeps for its backward pass, in bytes, for each implementation of its layers.

For `cpu` (megatron-core's own layers on a host without a GPU) the bytes are those of a listing of saved tensors
(`tests/cluster/test_saved_bytes.py`). The others are read in sources, not measured: `fused` are the same layers on a
GPU (megatron-core's fused SwiGLU and GELU, PyTorch's fused norms), `transformer_engine` Transformer Engine's
`LayerNormLinear` and `Linear`. A storage is counted where it is kept first. Weights are not counted.
"""

from typing import NamedTuple

from .attention_pass import attention_plan
from .model_shape import ModelShape
from .train_config import TrainConfig

RANDOM_STATE = 5056  # bytes of a state of PyTorch's generator for the CPU


class Part(NamedTuple):
    """A part of a model, named as in megatron-core, and the bytes that it keeps for the tokens of a rank."""

    name: str
    bytes: int


class Widths:
    """Numbers that a token has on a rank, by tensor.

    Attributes:
        size: bytes of a number in the model's dtype.
        hidden: hidden states between layers, which sequence parallelism splits.
        inner: the input of an MLP's second product.
        float32_norms: RMSNorm without a kernel of its own, which computes and keeps float32.
    """

    def __init__(self, model: ModelShape, run: TrainConfig) -> None:
        tensor = run.tensor_model_parallel_size
        self.size = run.itemsize
        self.hidden = model.hidden_size // (tensor if run.sequence_parallel else 1)
        self.heads = model.num_attention_heads // tensor
        self.kv_heads = max(1, model.num_query_groups // tensor)
        self.queries = self.heads * model.kv_channels
        self.keys = self.kv_heads * model.kv_channels
        self.inner = model.ffn_hidden_size // tensor
        self.vocabulary = model.padded_vocab_size // tensor
        self.float32_norms = run.implementation == "cpu" and model.normalization == "RMSNorm"


def attention_parts(model: ModelShape, run: TrainConfig) -> list[Part]:
    """The attention of a layer, with its norm."""
    w = Widths(model, run)
    each = {"input_layernorm": _norm(model, run, w.hidden), "linear_qkv": w.size * w.hidden}
    if model.qk_layernorm:
        each["q_layernorm"] = w.heads * _norm(model, run, model.kv_channels)
        each["k_layernorm"] = w.kv_heads * _norm(model, run, model.kv_channels)
        if not (w.float32_norms and w.size < 4):  # it keeps a view of the whole product
            each["k_layernorm"] += w.size * (w.queries + w.keys)
    # Ranks of a head group keep a replica of a key/value head where they are more than the heads.
    plan = attention_plan(model, run, False)
    keys = max(w.kv_heads, plan.heads if plan.keeps_swapped else 0) * model.kv_channels
    each["core_attention"] = 2 * w.size * (w.queries + keys) + 4 * w.heads
    return _of_tokens(run, each)


def mlp_parts(model: ModelShape, run: TrainConfig) -> list[Part]:
    """The MLP or the experts of a layer, with the norm before them.

    Experts are those of one rank, which get as many tokens as others. Their load-balancing losses are left out.
    """
    w = Widths(model, run)
    each = {"pre_mlp_layernorm": _norm(model, run, w.hidden)}
    if model.num_experts:
        each |= _experts(model, run, w)
    elif run.mlp_chunks_for_training > 1 or "mlp" in run.recompute_modules:
        each["mlp"] = w.size * w.hidden  # the inputs of the chunks
    else:
        each["linear_fc1"] = w.size * w.hidden
        each["mlp"] = w.size * activation_vectors(model, run) * w.inner
        each["linear_fc2"] = w.size * w.inner
    return _of_tokens(run, each)


def _experts(model: ModelShape, run: TrainConfig, w: Widths) -> dict[str, int]:
    """What experts keep of a token, beside the input of their router."""
    chosen, width = model.moe_router_topk, model.moe_ffn_hidden_size or 0
    shared = model.moe_shared_expert_intermediate_size or 0
    weighted = 1 if run.implementation == "cpu" else 0  # the activation before it is multiplied by the probability
    kept = activation_vectors(model, run) + weighted
    each = {
        "router": chosen * (8 + 4),  # which experts, and their probabilities
        "mlp": chosen * 8 + (model.num_experts or 0) * (1 + w.size),  # the order of tokens by expert
        "linear_fc1": w.size * w.hidden + chosen * w.size * w.hidden,
        "experts": chosen * w.size * (kept * width + 1),
        "linear_fc2": w.size * (chosen * width + shared),
    }
    if shared:
        each["shared_experts"] = w.size * activation_vectors(model, run) * shared
    return each


def activation_vectors(model: ModelShape, run: TrainConfig) -> int:
    """Vectors as wide as the MLP that its activation keeps."""
    if not model.swiglu:
        return 1
    return 4 if run.implementation == "cpu" else 2  # unfused: also both factors of the product


def _norm(model: ModelShape, run: TrainConfig, width: int) -> int:
    """What a norm of one vector keeps."""
    if model.normalization == "LayerNorm":
        statistic = run.itemsize if run.implementation == "cpu" else 4
        return run.itemsize * width + 2 * statistic
    if run.implementation == "cpu":
        return 2 * 4 * width + 4  # the input and the normalized input in float32
    return run.itemsize * width + 4


def head_parts(model: ModelShape, run: TrainConfig) -> list[Part]:
    """The last stage's norm, output layer and loss. In chunks, the loss keeps its gradients instead of logits."""
    w = Widths(model, run)
    norm = Part("final_layernorm", run.tokens * _norm(model, run, w.hidden))
    if run.tokens_of_loss < run.tokens:
        gradients = w.size * w.hidden * (run.tokens + w.vocabulary) + 4
        return [norm, Part("loss", gradients)]
    each = {"output_layer": w.size * w.hidden, "loss": 4 * w.vocabulary + 1 + 8 + 4}
    return [norm, *_of_tokens(run, each)]


def checkpoint_parts(model: ModelShape, run: TrainConfig, checkpoints: float) -> list[Part]:
    """The layers of a micro batch that are recomputed, in `checkpoints` groups: their inputs and random states."""
    w = Widths(model, run)
    hidden = 0 if run.offload_checkpoints else w.size * w.hidden
    inputs = Part("decoder", round(checkpoints * run.tokens * hidden))
    states = round(2 * checkpoints) + 3 if run.implementation == "cpu" else round(checkpoints)
    return [inputs, Part("random states", RANDOM_STATE * states)]


def kept_attention(model: ModelShape, run: TrainConfig) -> int:
    """Bytes that a recomputed layer keeps of its attention (`--recompute-whitelist core_attention`)."""
    if run.offload_kept:
        return 0
    w = Widths(model, run)
    statistics = 2 if attention_plan(model, run, False).keeps_swapped else 1  # also that of the swapped heads
    return run.tokens * (w.size * w.queries + 4 * w.heads * statistics)


def rotary_tables(model: ModelShape, run: TrainConfig) -> int:
    """Bytes of the angles of a rank's positions, and of their cos and sin, which all layers share."""
    if model.positions:
        return 0
    rows = run.tokens // run.micro_batch_size
    return rows * model.kv_channels * (4 + 2 * run.itemsize)


def _of_tokens(run: TrainConfig, each: dict[str, int]) -> list[Part]:
    return [Part(name, size * run.tokens) for name, size in each.items()]
