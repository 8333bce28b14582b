"""What a rank has in a whole step: weights, gradients, optimizer, sharded or not, and the inputs of a micro batch."""

from collections.abc import Iterator

from . import saved_bytes
from .layers_memory import hidden_bytes, micro_batches_in_flight
from .model_shape import ModelShape
from .moment import GATHERED, GRADIENTS, MemoryItem
from .train_config import TrainConfig

# Of Megatron-FSDP (megatron-core 0.16.1, `megatron_fsdp.py`): the default of `suggested_communication_unit_size`.
REDUCED_AT_ONCE = 10**9  # whole gradients that wait for their reduction
GATHERED_AHEAD = REDUCED_AT_ONCE // 2  # weights
BATCH = 8 + 8 + 8 + 4  # bytes of a token: itself, its label and position (int64), its weight in the loss


def states_of(model: ModelShape, run: TrainConfig, parameters: int, updated: int) -> Iterator[MemoryItem]:
    """Weights, gradients and optimizer of a rank's parameters; the optimizer has `updated`, over all that shard it."""
    dtype = run.itemsize
    layer = model.layer_parameters(run.tensor_model_parallel_size)
    over = {what: run.shards(what) for what in ("params", "grads", "optim")}
    by = {what: f" / {n} data x context ranks that shard it" if n > 1 else "" for what, n in over.items()}
    size = parameters * dtype // over["params"]
    yield MemoryItem("weights", size, f"{parameters:,} parameters x {dtype} bytes{by['params']}")
    if over["params"] > 1:
        layers = _layers_within(GATHERED_AHEAD, model, run)
        in_layers = model.num_layers // run.pipeline_model_parallel_size * layer
        whole = parameters - in_layers  # embedding, output layer, norm
        size, formula = layers * layer + whole, f"({layers} layers of {layer:,} parameters + {whole:,}) x {dtype} bytes"
        yield MemoryItem(GATHERED, size * dtype, formula)
        if run.on_cpu:
            yield MemoryItem("gloo's copy", layer * dtype, f"1 layer of {layer:,} parameters x {dtype} bytes")
    size = run.grad_itemsize
    kind = "float32" if size == 4 else "16 bits"
    yield MemoryItem("gradients", parameters * size // over["grads"], f"{size} bytes ({kind}){by['grads']}")
    if over["grads"] > 1:
        yield MemoryItem(GRADIENTS, layer * 4, f"1 layer of {layer:,} parameters x 4 bytes")
    state, parts = (12, "float32 copy and two moments") if dtype == 2 else (8, "two moments")
    optimizer = updated * state // over["optim"]
    if run.optimizer_on_host:
        optimizer = round(optimizer * (1 - run.optimizer_on_host))
        parts += ", less what is in host memory"
    yield MemoryItem("optimizer", optimizer, f"{state} bytes ({parts}){by['optim']}")


def waiting_gradients(model: ModelShape, run: TrainConfig, parameters: int) -> MemoryItem:
    """Whole gradients that Megatron-FSDP has at the end of the backward pass."""
    layer = model.layer_parameters(run.tensor_model_parallel_size)
    reduced = layer
    whole = _layers_within(REDUCED_AT_ONCE, model, run) * layer
    if run.shards("params") == 1:  # all in one piece
        reduced = whole = min(parameters, REDUCED_AT_ONCE + layer)
    copy = reduced if run.on_cpu else 0  # gloo's, in the reduce-scatter
    return MemoryItem(GRADIENTS, 4 * (whole + copy), f"4 bytes x {whole + copy:,} that are reduced")


def _layers_within(numbers: int, model: ModelShape, run: TrainConfig) -> int:
    """Layers of a stage that Megatron-FSDP has whole: that at work, and others until they have so many numbers."""
    layers = model.num_layers // run.pipeline_model_parallel_size
    return min(layers, 1 + -(-numbers // model.layer_parameters(run.tensor_model_parallel_size)))


def update_of(model: ModelShape, run: TrainConfig, updated: int) -> MemoryItem:
    """Adam's own numbers: PyTorch's loop over weights, or its call for all of them; none in Transformer Engine's."""
    shard = round(updated // run.shards("optim") * (1 - run.optimizer_on_host))
    largest = min(shard, model.largest_weight(run.tensor_model_parallel_size))
    size, formula = {
        "cpu": (2 * 4 * largest, f"2 x 4 bytes x {largest:,} parameters, the largest weight"),
        "fused": (4 * shard, f"4 bytes x {shard:,} parameters"),
        "transformer_engine": (0, "in place"),
    }[run.implementation]
    return MemoryItem("Adam's own numbers", size, formula)


def inputs_of(model: ModelShape, run: TrainConfig, stage: int) -> Iterator[MemoryItem]:
    """The batch, the rotary tables, and hidden states that come from other ranks."""
    whole = run.micro_batch_size * run.seq_length
    yield MemoryItem(
        "batch", BATCH * (whole + run.tokens), f"{BATCH} bytes x tokens of whole sequences and of the rank"
    )
    if not model.positions:
        tables = saved_bytes.rotary_tables(model, run)
        yield MemoryItem("rotary tables", tables, "angles, cos and sin of a rank's positions, for all layers")
    if run.sequence_parallel:
        size = run.tokens * model.hidden_size * run.itemsize
        yield MemoryItem("gathered hidden states", size, "tokens x hidden size, for the tensor-parallel products")
    if run.on_cpu and run.pipeline_model_parallel_size > 1:
        last = stage == run.pipeline_model_parallel_size - 1  # its last part makes a loss
        size = round(micro_batches_in_flight(run, stage) * run.virtual_stages - last) * hidden_bytes(model, run)
        yield MemoryItem("pipeline outputs", size, "hidden states of each part in flight of a stage")
