"""The moments of a training step with FSDP2, which gathers and reduces layer by layer."""

from collections.abc import Iterator

from . import saved_bytes
from .layers_memory import LayersMemory
from .model_shape import ModelShape
from .moment import (
    ATTENTION,
    BUFFERS,
    BUILDING,
    END,
    GATHER,
    GATHERED,
    GRADIENTS,
    MLP,
    OPTIMIZER,
    OUTPUT,
    REDUCTION,
    MemoryItem,
    Moment,
)
from .saved_bytes import Widths
from .states_memory import inputs_of, update_of
from .train_config import TrainConfig
from .work_memory import attention_backward, mlp_backward, output_and_loss, residual_gradient


def fsdp2_moments(model: ModelShape, run: TrainConfig) -> Iterator[Moment]:
    """All moments of a rank, which has no pipeline: sharded gradients come, and activations go, layer by layer.

    Between the second layer of the backward pass and the last but one, memory grows or falls evenly.
    """
    parameters = _parameters(model, run)
    yield _building(model, run, parameters)
    resting, inputs = list(_shards(model, run, parameters)), list(inputs_of(model, run, 0))
    forward = _whole_tensors(model, run, 1, 0)[:1]
    yield Moment(OUTPUT, [*resting, *inputs, *forward, *LayersMemory(model, run).kept(1), output_and_loss(model, run)])
    last = model.num_layers - 1
    for done in sorted({0, min(1, last), max(0, last - 1), last}):
        for moment in _layer_moments(model, run, done):
            yield moment._replace(items=[*resting, *inputs, *moment.items])
    root = _root(model, run)
    copies = 8 if run.on_cpu else 4 + run.itemsize  # in float32, and gloo's or those in the dtype
    gathered = _whole_tensors(model, run, 0, model.num_layers)[0]
    shards = run.shards("grads")
    size = 0 if run.shards_on_host else 4 * parameters // shards
    sharded = MemoryItem("gradients", size, f"4 bytes (float32) / {shards} data x context ranks that shard it")
    whole = MemoryItem(GRADIENTS, root * copies, f"{root:,} numbers of the output layer")
    yield Moment(REDUCTION, [*resting, gathered, sharded, whole])
    yield Moment(OPTIMIZER, [*resting, sharded, update_of(model, run, parameters)])


def _building(model: ModelShape, run: TrainConfig, parameters: int) -> Moment:
    """The embedding, and the last layer or the output layer, while they are whole; other layers are sharded already."""
    layer, root = model.layer_parameters(run.tensor_model_parallel_size), _root(model, run)
    layers, shards = model.num_layers * layer, run.shards("params")
    embedding = parameters - layers - root  # 0 if it is tied
    whole = embedding + max(layer, root)
    sharded = layers if layer > root else layers + max(embedding, root)
    formula = f"{whole:,} parameters of the embedding and a layer or the output layer x {run.itemsize} bytes"
    of_shards = f"{sharded:,} parameters x {run.itemsize} bytes / {shards} data x context ranks that shard it"
    items = [
        MemoryItem("whole weights", whole * run.itemsize, formula),
        MemoryItem("weights", sharded * run.itemsize // shards, of_shards),
    ]
    return Moment(BUILDING, items)


def _layer_moments(model: ModelShape, run: TrainConfig, done: int) -> Iterator[Moment]:
    """Moments of the backward pass of a layer, with `done` layers behind it, without shards and inputs."""
    tensor = run.tensor_model_parallel_size
    layer, ahead = model.layer_parameters(tensor), done < model.num_layers - 1
    layers, residual = LayersMemory(model, run, done), residual_gradient(model, run)
    whole = _whole_tensors(model, run, 1 + ahead, done)

    def gradients(numbers: int, formula: str, size: int = run.itemsize) -> MemoryItem:
        return MemoryItem("gradients of a layer", numbers * size, f"{numbers:,} numbers{formula}")

    if run.on_cpu and ahead:
        copy = MemoryItem(
            "gloo's copy", layer * run.itemsize, f"1 layer of {layer:,} parameters x {run.itemsize} bytes"
        )
        yield Moment(GATHER, [*whole, *layers.kept(1), residual, copy])
    yield Moment(MLP, [*whole, *layers.at_work(1, 0), mlp_backward(model, run)])
    later = [*whole, *layers.at_work(1, 1), residual]
    product = model.hidden_size * (model.queries + 2 * model.keys) // tensor
    yield Moment(ATTENTION, [*later, gradients(layer - product, ""), attention_backward(model, run)])
    yield Moment(END, [*later, gradients(layer, ""), _first_product(model, run)])
    reduced = _whole_tensors(model, run, int(ahead), done + 1)
    copies = gradients(layer, ", copied while they are summed", 4 if run.on_cpu else run.itemsize)
    yield Moment(REDUCTION, [*reduced, *LayersMemory(model, run, done + 1).kept(1), residual, copies])


def _shards(model: ModelShape, run: TrainConfig, parameters: int) -> Iterator[MemoryItem]:
    """Weights and moments of a rank; none on the device if they are in host memory."""
    shards = run.shards("params")
    by = f" / {shards} data x context ranks that shard it" if shards > 1 else ""
    there = not run.shards_on_host
    yield MemoryItem("weights", there * parameters * 4 // shards, f"{parameters:,} parameters x 4 bytes{by}")
    yield MemoryItem("optimizer", there * parameters * 8 // shards, f"8 bytes (two moments){by}")


def _whole_tensors(model: ModelShape, run: TrainConfig, layers: int, done: int) -> list[MemoryItem]:
    """Gathered weights, sharded gradients and whole ones, with `layers` gathered and `done` differentiated."""
    layer = model.layer_parameters(run.tensor_model_parallel_size)
    root, shards = _root(model, run), run.shards("grads")
    gathered = layers * layer + root
    formula = f"({layers} layers of {layer:,} parameters + {root:,}) x {run.itemsize} bytes"
    newest = layer if done else 0
    if run.shards_on_host:  # but for what is being copied there
        numbers = newest
    elif run.micro_batches > 1:  # those of micro batches before, to which the newest are added
        numbers = _parameters(model, run) + newest
    else:
        numbers = done * layer
    waiting = 4 * layer * (done > 0) + root * run.itemsize
    return [
        MemoryItem(GATHERED, gathered * run.itemsize, formula),
        MemoryItem("gradients", 4 * numbers // shards, f"4 bytes (float32) x {numbers:,} / {shards} ranks"),
        MemoryItem(GRADIENTS, waiting, f"of the layer before in float32, and {root:,} of the output layer"),
    ]


def _parameters(model: ModelShape, run: TrainConfig) -> int:
    """All parameters of the model, with the part of each tensor-parallel rank: neither stages nor experts split it."""
    return model.parameters_on_stage(0, 1, run.tensor_model_parallel_size, 1)


def _root(model: ModelShape, run: TrainConfig) -> int:
    """Numbers outside of layers that are gathered for a whole step: an embedding of its own is not."""
    layers = model.num_layers * model.layer_parameters(run.tensor_model_parallel_size)
    whole = _parameters(model, run) - layers
    if model.untie_embeddings_and_output_weights:
        whole -= model.padded_vocab_size * model.hidden_size // run.tensor_model_parallel_size
    return whole


def _first_product(model: ModelShape, run: TrainConfig) -> MemoryItem:
    """Gradients in the first product of attention, less what attention kept for itself."""
    w = Widths(model, run)
    numbers = w.queries + 2 * w.keys + w.hidden
    kept = {part.name: part.bytes for part in saved_bytes.attention_parts(model, run)}
    size = run.tokens * w.size * numbers - kept.get("core_attention", 0)
    return MemoryItem(BUFFERS, size, "gradients in the first product, less what attention kept")
