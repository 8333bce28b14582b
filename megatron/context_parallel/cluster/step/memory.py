"""The memory of one rank in training, by kind."""

from collections.abc import Iterator
from typing import NamedTuple

from .attention_pass import attention_buffers
from .model_shape import ModelShape
from .train_config import TrainConfig


class MemoryItem(NamedTuple):
    """Memory of one kind: its name, its bytes on a rank, and the formula."""

    what: str
    bytes: int
    formula: str


LOGITS, BUFFERS = "logits and loss", "attention buffers"


def memory(model: ModelShape, run: TrainConfig, stage: int = 0) -> list[MemoryItem]:
    """The peak memory of a rank of pipeline stage `stage` (0 first), by kind; `total` sums it."""
    stages, tensor = run.pipeline_model_parallel_size, run.tensor_model_parallel_size
    count = model.parameters_on_stage(stage, stages, tensor, model.expert_model_parallel_size)
    # The optimizer of all experts is sharded over data x context ranks, whether experts are sharded or not.
    parts = list(_states(model, run, count, model.parameters_on_stage(stage, stages, tensor)))
    parts.append(_activations(model, run, stage))
    if stage == stages - 1:
        parts.append(_logits(model, run))
    parts.append(MemoryItem(BUFFERS, attention_buffers(model, run), "peak chunks and partials alive in a pass"))
    return parts


def total(parts: list[MemoryItem]) -> int:
    """Peak bytes: logits and attention buffers are not alive at the same time."""
    return sum(part.bytes for part in parts if part.what not in (LOGITS, BUFFERS)) + max(
        part.bytes for part in parts if part.what in (LOGITS, BUFFERS)
    )


def fullest_stage(model: ModelShape, run: TrainConfig) -> int:
    """The pipeline stage whose ranks need the most memory."""
    return max(range(run.pipeline_model_parallel_size), key=lambda stage: total(memory(model, run, stage)))


# ------------------------------------------------------------------------------------------ weights and the rest


def _states(model: ModelShape, run: TrainConfig, count: int, shared: int) -> Iterator[MemoryItem]:
    dtype = run.itemsize
    layer = model.layer_parameters(run.tensor_model_parallel_size)
    over = {what: run.shards(what) for what in ("params", "grads", "optim")}
    by = {what: f" / {n} data x context ranks that shard it" if n > 1 else "" for what, n in over.items()}
    kept = 4 if run.use_torch_fsdp2 else dtype
    yield MemoryItem("weights", count * kept // over["params"], f"{count:,} parameters x {kept} bytes{by['params']}")
    if over["params"] > 1:
        yield MemoryItem("gathered weights", 2 * layer * dtype, f"2 layers of {layer:,} parameters x {dtype} bytes")
    yield MemoryItem("gradients", count * 4 // over["grads"], f"4 bytes (float32){by['grads']}")
    if over["grads"] > 1:
        yield MemoryItem("whole gradients", layer * 4, f"1 layer of {layer:,} parameters x 4 bytes")
    state, parts = (12, "float32 copy and two moments") if kept == 2 else (8, "two moments")
    optimizer = (shared if over["optim"] > 1 else count) * state // over["optim"]
    yield MemoryItem("optimizer", optimizer, f"{state} bytes ({parts}){by['optim']}")


# ------------------------------------------------------------------------------------------------- activations


def _logits(model: ModelShape, run: TrainConfig) -> MemoryItem:
    columns, dtype = model.padded_vocab_size // run.tensor_model_parallel_size, run.itemsize
    size = run.tokens_of_loss * columns * (dtype + 4)
    formula = f"tokens x vocabulary / tensor ranks x ({dtype} + 4) bytes"
    if run.tokens_of_loss < run.tokens:  # gradients of output layer and hidden states wait for the backward pass
        size += columns * model.hidden_size * (4 + dtype) + run.tokens * model.hidden_size * dtype
        formula = f"{run.tokens_of_loss} {formula} + gradients of the output layer and its input"
    return MemoryItem(LOGITS, size, formula)


def _activations(model: ModelShape, run: TrainConfig, stage: int) -> MemoryItem:
    tensor, h, each = run.tensor_model_parallel_size, model.hidden_size, run.recompute_num_layers
    whole = h / (tensor if run.sequence_parallel else 1)
    mlp = model.mlp_width * (3 if model.swiglu else 2)
    cut = run.mlp_chunks_for_training > 1
    layer = 4 * whole + (2 * model.queries + 2 * model.keys + (0 if cut else mlp)) / tensor
    layers = model.num_layers / run.pipeline_model_parallel_size
    inner = f" + {3 if model.swiglu else 2} ffn"
    formula = f"4h + (2q + 2kv{inner}) / tensor ranks values per token and layer"
    if run.sequence_parallel:
        formula = formula.replace("4h + (", "(4h + ")
    values = layers * layer
    if run.recompute_granularity == "full" and each:
        kept = model.queries / tensor if run.recompute_whitelist else 0
        if run.recompute_method == "uniform":
            values = layers / each * whole + each * layer + layers * kept
            formula = f"h per {each} layers kept, and {each} layers at work: {formula}"
        else:
            values = run.turns * each * (whole + kept) + (layers - run.turns * each) * layer + layer
            formula = f"h for {each} recomputed layers, others and one at work: {formula}"
        formula += " + q / tensor ranks a recomputed layer" if kept else ""
    in_flight = _in_flight(run, stage)
    values *= in_flight
    formula += f", x {in_flight:g} micro batches in flight"
    if cut:
        values += mlp / tensor / run.mlp_chunks_for_training
        formula = formula.replace(inner, "") + f", and {inner[3:]} of 1 / {run.mlp_chunks_for_training} of the tokens"
    size = round(values * run.tokens * run.itemsize)
    return MemoryItem("activations", size, formula)


def _in_flight(run: TrainConfig, stage: int) -> float:
    """Micro batches whose activations a stage holds at once; an interleaved schedule counts in parts of a stage."""
    stages, turns = run.pipeline_model_parallel_size, run.turns
    if turns == 1:
        return min(stages - stage, run.micro_batches)
    return min((stages * turns + stages - 1 - 2 * stage) / turns, run.micro_batches)
