"""What each part of a model keeps for its backward pass, in bytes, for each implementation of its layers.

For `cpu` (megatron-core's own layers on a host without a GPU) the bytes are those of a listing of saved tensors
(`tests/cluster/test_saved_bytes.py`). The others are read in sources, not measured: `fused` are the same layers on a
GPU (megatron-core's fused SwiGLU and GELU, PyTorch's fused norms), `transformer_engine` Transformer Engine's
`LayerNormLinear` and `Linear`. A storage is counted where it is kept first. Weights are not counted.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from .attention_pass import attention_plan
from .mlp_chunks import mlp_chunks
from .model_shape import ModelShape
from .train_config import TrainConfig

RANDOM_STATE = 5056  # bytes of a state of PyTorch's generator for the CPU
MASK_TYPE = 4  # bytes of the tensor with which Megatron's checkpoint of attention names the mask


class Part(NamedTuple):
    """A part of a model, named as in megatron-core, and the bytes that it keeps for the tokens of a rank."""

    name: str
    bytes: int


def total(parts: Iterable[Part]) -> int:
    """The bytes of all parts."""
    return sum(part.bytes for part in parts)


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
        self.float32_norms = run.on_cpu and model.normalization == "RMSNorm"


def attention_parts(model: ModelShape, run: TrainConfig) -> list[Part]:
    """The attention of a layer, with its norm."""
    w = Widths(model, run)
    each = _norm_and_output(model, run, "input_layernorm", "linear_qkv")
    if model.qk_layernorm:
        each["q_layernorm"] = w.heads * _norm(model, run, model.kv_channels)
        each["k_layernorm"] = w.kv_heads * _norm(model, run, model.kv_channels)
        if w.float32_norms and w.size < 4:
            pass  # they keep copies of their inputs
        elif 1 < w.kv_heads < w.heads:  # queries are copied, keys a view of the whole product
            each["k_layernorm"] += w.size * (w.queries + w.keys)
        else:  # both are views of it
            each["q_layernorm"] += 2 * w.size * w.keys
            each["k_layernorm"] -= w.size * w.keys
    if "core_attn" in run.computed_again:
        each |= _core_attention_inputs(model, run, w)
        return [*_of_tokens(run, each), Part("self_attention", MASK_TYPE)]
    each["core_attention"] = _core_attention(model, run, w)
    return _of_tokens(run, each)


def _core_attention(model: ModelShape, run: TrainConfig, w: Widths) -> int:
    """Queries, keys, values, output and log-sum-exp of a token."""
    return 2 * w.size * (w.queries + _kept_keys(model, run, w)) + 4 * w.heads


def _kept_keys(model: ModelShape, run: TrainConfig, w: Widths) -> int:
    """Ranks of a head group keep a replica of a key/value head where they are more than the heads."""
    plan = attention_plan(model, run, False)
    return max(w.kv_heads, plan.head_parallel_size if plan.keeps_swapped else 0) * model.kv_channels


def _core_attention_inputs(model: ModelShape, run: TrainConfig, w: Widths) -> dict[str, int]:
    """What Megatron's checkpoint of attention keeps of a token: values are a view of the whole product."""
    new = not model.positions or model.qk_layernorm  # queries and keys that RoPE or norms made
    normed = model.qk_layernorm and not (w.float32_norms and w.size < 4)  # they keep the product
    numbers = new * (w.queries + w.keys) + (not normed) * (w.queries + 2 * w.keys)
    return {"self_attention": w.size * numbers, "linear_proj": w.size * w.queries}


def mlp_parts(model: ModelShape, run: TrainConfig) -> list[Part]:
    """The MLP or the experts of a layer, with the norm before them.

    Experts are those of one rank, which get as many tokens as others. Their load-balancing losses are left out.
    """
    w = Widths(model, run)
    each: dict[str, int]
    if model.num_experts:
        checkpoints = {"moe", "shared_experts"} & {*run.computed_again}
        each = Counter(_norm_and_output(model, run, "pre_mlp_layernorm", "mlp" if checkpoints else "linear_fc1"))
        if "moe" not in checkpoints:
            each += Counter(_experts(model, run, w))
    elif mlp_chunks(model, run) > 1 or "mlp" in run.computed_again:
        each = _norm_and_output(model, run, "pre_mlp_layernorm", "mlp")  # the inputs of the chunks
    else:
        each = _norm_and_output(model, run, "pre_mlp_layernorm", "linear_fc1")
        each["mlp"] = w.size * activation_vectors(model, run) * w.inner
        each["linear_fc2"] = w.size * w.inner
    return _of_tokens(run, each)


def _experts(model: ModelShape, run: TrainConfig, w: Widths) -> dict[str, int]:
    """What experts keep of a token, beside the input of their router."""
    chosen, width = model.moe_router_topk, model.moe_ffn_hidden_size or 0
    shared = 0 if "shared_experts" in run.computed_again else model.moe_shared_expert_intermediate_size or 0
    weighted = 0 if _fuses_activation(model, run) else 1  # the activation before it is multiplied by the probability
    kept = activation_vectors(model, run) + weighted
    each = {
        "router": chosen * (8 + 4),  # which experts, and their probabilities
        "mlp": chosen * 8 + (model.num_experts or 0) * (1 + w.size),  # the order of tokens by expert
        "linear_fc1": chosen * w.size * w.hidden,
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
    return 2 if _fuses_activation(model, run) else 4  # unfused: also both factors of the product


def _fuses_activation(model: ModelShape, run: TrainConfig) -> bool:
    """Whether the activation is one kernel. Of experts, only gated ones without biases have one."""
    own = model.num_experts and (model.add_bias_linear or not model.swiglu)
    return not run.on_cpu and not own


def _norm_and_output(model: ModelShape, run: TrainConfig, norm: str, after: str) -> dict[str, int]:
    """What a norm and the part `after` it keep: of a recomputed norm its input alone."""
    w = Widths(model, run)
    hidden = w.size * w.hidden
    if "layernorm" in run.computed_again:
        return {"layer": hidden}
    return {norm: _norm(model, run, w.hidden), after: hidden}


def _norm(model: ModelShape, run: TrainConfig, width: int) -> int:
    """What a norm of one vector keeps."""
    copied = Widths(model, run).float32_norms and run.itemsize < 4
    return _norm_beside_input(model, run, width) + (0 if copied else run.itemsize * width)


def _norm_beside_input(model: ModelShape, run: TrainConfig, width: int) -> int:
    if model.normalization == "LayerNorm":
        return 2 * (run.itemsize if run.on_cpu else 4)
    if run.on_cpu:  # the normalized input in float32, and a float32 copy of another input
        return (4 if run.itemsize == 4 else 8) * width + 4
    return 4


def attention_again(model: ModelShape, run: TrainConfig) -> int:
    """Bytes that a layer's attention takes beyond what it keeps, while parts of it are computed again."""
    w = Widths(model, run)
    size = 0
    if "layernorm" in run.computed_again:
        size += _norm(model, run, w.hidden)
    if "core_attn" in run.computed_again:
        size += _core_attention(model, run, w) - w.size * w.queries  # the output takes the place of the first one
        if attention_plan(model, run, False).head_parallel_size == 1 and (not model.positions or model.qk_layernorm):
            size -= w.size * (w.queries + w.keys)  # saved as they are
    return size * run.tokens


def mlp_again(model: ModelShape, run: TrainConfig) -> int:
    """The same of its MLP or experts; without those of `--recompute-modules mlp`, which have a moment of their own."""
    if not run.computed_again:
        return 0
    plain = replace(run, recompute_modules=("mlp",) if "mlp" in run.computed_again else ("core_attn",))
    return total(mlp_parts(model, plain)) - total(mlp_parts(model, run))


def output_parts(model: ModelShape, run: TrainConfig) -> list[Part]:
    """The last stage's norm, output layer and loss. In chunks, the loss keeps its gradients instead of logits."""
    w = Widths(model, run)
    norm = Part("final_layernorm", run.tokens * _norm(model, run, w.hidden))
    if run.tokens_of_loss < run.tokens:
        gradients = w.size * w.hidden * (run.tokens + w.vocabulary) + 4
        return [norm, Part("loss", gradients)]
    each = {"output_layer": w.size * w.hidden, "loss": 4 * w.vocabulary + 1 + 8 + 4}
    return [norm, *_of_tokens(run, each)]


def selective_states(run: TrainConfig, layers: float) -> Part:
    """The random states that selective recomputation of parts of `layers` layers keeps."""
    again = set(run.computed_again)
    if "moe" in again:
        again -= {"shared_experts"}  # they are inside
    each = len(again - {"mlp"}) + ("layernorm" in again)  # a layer has two norms
    return _random_states(run, each * layers)


def _random_states(run: TrainConfig, checkpoints: float) -> Part:
    states = round(2 * checkpoints) + 3 if run.on_cpu else round(checkpoints)
    return Part("random states", RANDOM_STATE * states if checkpoints else 0)


def checkpoint_parts(model: ModelShape, run: TrainConfig, checkpoints: float) -> list[Part]:
    """The layers of a micro batch that are recomputed, in `checkpoints` groups: their inputs and random states."""
    w = Widths(model, run)
    hidden = 0 if run.offload_checkpoints else w.size * w.hidden
    inputs = Part("decoder", round(checkpoints * run.tokens * hidden))
    return [inputs, _random_states(run, checkpoints)]


def kept_parts(model: ModelShape, run: TrainConfig) -> list[Part]:
    """What a recomputed layer keeps beside its input (`--recompute-whitelist`)."""
    if run.offload_kept:
        return []
    w = Widths(model, run)
    statistics = 2 if attention_plan(model, run, False).keeps_swapped else 1  # also that of the swapped heads
    norm = w.size * w.hidden + _norm_beside_input(model, run, w.hidden)
    first, second = _mlp_outputs(model, run, w)
    each = {
        "core_attention": {"core_attention": w.size * w.queries + 4 * w.heads * statistics},
        "qkv": {"linear_qkv": w.size * (w.queries + 2 * w.keys)},
        "proj": {"linear_proj": w.size * w.hidden},
        "fc1": {"linear_fc1": w.size * first},
        "fc2": {"linear_fc2": w.size * second},
        "norms": {"input_layernorm": norm, "pre_mlp_layernorm": norm},
    }
    if model.qk_layernorm:
        head = w.size * model.kv_channels + _norm_beside_input(model, run, model.kv_channels)
        each["norms"] |= {"q_layernorm": w.heads * head, "k_layernorm": w.kv_heads * head}
    return [part for name in run.recompute_whitelist for part in _of_tokens(run, each[name])]


def offloaded(model: ModelShape, run: TrainConfig) -> tuple[int, int]:
    """Bytes of a layer that `--offload-modules` frees on the device, and those that it takes of the host.

    The output of attention is also the input of its projection, so it is copied twice, and freed if both are named.
    """
    w = Widths(model, run)
    statistics = 4 if run.tokens >= run.min_offloaded_tensor_size else 0  # of a norm; of attention one for each head
    lse = 4 * w.heads if run.tokens * w.heads >= run.min_offloaded_tensor_size else 0

    def sized(*widths: int) -> int:
        return sum(w.size * width for width in widths if run.tokens * width >= run.min_offloaded_tensor_size)

    out, keys = sized(w.queries), _kept_keys(model, run, w)
    on_host = {
        "qkv_linear": sized(w.hidden, w.hidden) + statistics,
        "core_attn": sized(w.queries, keys, keys) + lse + out,
        "attn_proj": out,
    }
    copied = sum(on_host[name] for name in run.offload_modules)
    stays_or_twice = out if "core_attn" in run.offload_modules else 0
    return (copied - stays_or_twice) * run.tokens, copied * run.tokens


def fetched_ahead(model: ModelShape, run: TrainConfig, layers: int) -> int:
    """Bytes of a group of recomputed `layers` that come back from host memory while those after it are at work."""
    hidden = run.tokens * run.itemsize * Widths(model, run).hidden
    kept = total(kept_parts(model, replace(run, offload_kept=False)))
    return hidden * run.offload_checkpoints + layers * kept * run.offload_kept


def _mlp_outputs(model: ModelShape, run: TrainConfig, w: Widths) -> tuple[int, int]:
    """Numbers that the first and the second products of an MLP, or of all experts of a token, return."""
    gates = 2 if model.swiglu else 1
    if not model.num_experts:
        return gates * w.inner, w.hidden
    shared = model.moe_shared_expert_intermediate_size or 0
    chosen = model.moe_router_topk
    first = gates * (chosen * (model.moe_ffn_hidden_size or 0) + shared)
    return first, (chosen + (shared > 0)) * w.hidden


def rotary_tables(model: ModelShape, run: TrainConfig) -> int:
    """Bytes of the angles of a rank's positions, and of their cos and sin, which all layers share."""
    if model.positions:
        return 0
    rows = run.tokens // run.micro_batch_size
    return rows * model.kv_channels * (4 + 2 * run.itemsize)


def _of_tokens(run: TrainConfig, each: dict[str, int]) -> list[Part]:
    return [Part(name, size * run.tokens) for name, size in each.items()]
