"""What is at work in a layer or in the output layer, beyond what layers keep: logits, gradients and buffers."""

from . import saved_bytes
from .attention_pass import attention_buffers
from .layers_memory import hidden_bytes
from .mlp_chunks import mlp_chunks, recomputed_anyway
from .model_shape import ModelShape
from .moment import BUFFERS, LOGITS, MLP, MemoryItem
from .saved_bytes import Widths
from .train_config import TrainConfig


def output_and_loss(model: ModelShape, run: TrainConfig) -> MemoryItem:
    """The last norm, logits and loss, in the forward pass or in the backward pass of the output layer."""
    w = Widths(model, run)
    weight = w.vocabulary * model.hidden_size
    hidden = hidden_bytes(model, run)
    parts = {part.name: part.bytes for part in saved_bytes.output_parts(model, run)}
    logits = _logits(w, run.tokens_of_loss, weight, hidden)
    if run.tokens_of_loss == run.tokens:
        small = parts["loss"] - 4 * w.vocabulary * run.tokens
        size = parts["final_layernorm"] + parts["output_layer"] + small + logits
        return MemoryItem(
            LOGITS, size, f"{run.tokens:,} tokens x {w.vocabulary:,} logits and gradients, in {w.size} and 4 bytes"
        )
    last = hidden + (w.size * weight if w.size < 4 else 0)  # gradients of all chunks in the dtype of the model
    size = parts["final_layernorm"] + 2 * hidden + 4 * weight + max(logits, last)
    formula = (
        f"{run.tokens_of_loss:,} tokens x {w.vocabulary:,} logits, and gradients of the output layer and its input"
    )
    return MemoryItem(LOGITS, size, formula)


def _logits(w: Widths, tokens: int, weight: int, hidden: int) -> int:
    """Bytes of the logits of some tokens, with the gradients of the output layer's weight and input."""
    logits = tokens * w.vocabulary
    gradients = w.size * weight + hidden
    if w.size == 4:
        return 4 * logits + gradients
    return max((4 + w.size) * logits, w.size * logits + gradients)


def attention_backward(model: ModelShape, run: TrainConfig) -> MemoryItem:
    """Chunks, partials and what kernels need, where a pass has the most of them."""
    return MemoryItem(BUFFERS, attention_buffers(model, run), "peak chunks, partials and kernels at work in a pass")


def mlp_backward(model: ModelShape, run: TrainConfig) -> MemoryItem:
    """Gradients at work in the MLP of a layer, beyond what it keeps, with those of the layer's output."""
    w = Widths(model, run)
    hidden = hidden_bytes(model, run)
    if model.num_experts:
        width = model.moe_ffn_hidden_size or 0
        sent = model.moe_router_topk * hidden
        expert = 2 * run.tokens * model.moe_router_topk // model.num_experts * width * w.size
        size = hidden + sent + expert + w.size * width * model.hidden_size
        return MemoryItem(MLP, size, "gradients of the layer's and the experts' outputs, and of an expert")
    inner = run.tokens * w.size * w.inner
    weight = w.size * w.inner * model.hidden_size
    chunks = mlp_chunks(model, run)
    ends = _end_of_recomputation(model, run, chunks)
    if chunks > 1 or "mlp" in run.computed_again:
        size = hidden + max(ends, _chunk_of_mlp(model, run, chunks))
        return MemoryItem(MLP, size, f"1 / {chunks} of the tokens at work, and the weights' gradients")
    size = hidden + max(ends, 2 * inner if model.swiglu else inner, inner + weight)
    return MemoryItem(MLP, size, "gradients of the layer's output, and of the MLP's inner numbers and second weight")


def _end_of_recomputation(model: ModelShape, run: TrainConfig, chunks: int) -> int:
    """Bytes where a recomputed layer ends: the MLP's output, with the bias, and with the residual."""
    if run.recompute_granularity != "full":
        return 0
    hidden = hidden_bytes(model, run)
    added = hidden * (1 + (model.add_bias_linear and run.on_cpu))
    if chunks > 1 and recomputed_anyway(run):  # no output
        return added
    if not run.sequence_parallel:
        return added + hidden
    whole = run.tokens * run.itemsize * model.hidden_size  # before the reduce-scatter, which gloo copies
    return max(added + hidden, hidden + whole * (1 + run.on_cpu))


def _chunk_of_mlp(model: ModelShape, run: TrainConfig, chunks: int) -> int:
    """Bytes at work on the last chunk of an MLP, with the gradients of the others."""
    w = Widths(model, run)
    hidden, gates = hidden_bytes(model, run), 2 if model.swiglu else 1
    part, weight = w.size * w.inner * run.tokens // chunks, w.size * w.inner * model.hidden_size
    kept = part * (saved_bytes.activation_vectors(model, run) + 1)
    size, newest = hidden - hidden // chunks, 0
    if recomputed_anyway(run) and "mlp" not in run.computed_again:  # a chunk's are complete before they are added
        size, newest = hidden + hidden // chunks, weight
    if chunks > 1:
        size += (gates + 1) * weight
    second, activation, first = kept + part + weight, kept + gates * part + newest, gates * (part + weight) + newest
    return size + max(second, activation, first)


def residual_gradient(model: ModelShape, run: TrainConfig) -> MemoryItem:
    """The gradient of a layer's input that goes around attention."""
    return MemoryItem("residual gradient", hidden_bytes(model, run), "hidden states of the rank")
