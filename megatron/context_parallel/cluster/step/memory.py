"""The memory of one rank in training: the largest of named moments of a step, by kind.

On a CPU the moments are those of the allocator's peaks (`benchmarks/memory.py`). On a GPU they are read in sources.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from . import saved_bytes
from .attention_pass import attention_buffers
from .mlp_chunks import mlp_chunks, recomputed_anyway
from .model_shape import ModelShape
from .saved_bytes import Part, Widths
from .train_config import TrainConfig

# Of Megatron-FSDP (megatron-core 0.16.1, `megatron_fsdp.py`): the default of `suggested_communication_unit_size`.
REDUCED_AT_ONCE = 10**9  # whole gradients that wait for their reduction
GATHERED_AHEAD = REDUCED_AT_ONCE // 2  # weights
OPTIMIZER_ON_HOST = 4 * 4  # bytes of a parameter: float32 copy, gradient and two moments
BATCH = 8 + 8 + 8 + 4  # bytes of a token: itself, its label and position (int64), its weight in the loss


class MemoryItem(NamedTuple):
    """Memory of one kind: its name, its bytes on a rank, and the formula."""

    what: str
    bytes: int
    formula: str


GATHERED = "gathered weights"
LOGITS, BUFFERS = "logits and loss", "attention buffers"
OUTPUT, MLP, ATTENTION, END = "output layer", "MLP backward", "attention backward", "end of a layer"
GATHER = "gather of weights"
REDUCTION, OPTIMIZER = "gradient reduction", "optimizer step"
GRADIENTS = "whole gradients"
BUILDING = "building of the model"


class Moment(NamedTuple):
    """A moment of a step at which memory may be the largest, and all that a rank has then."""

    name: str
    items: list[MemoryItem]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)


def peak(model: ModelShape, run: TrainConfig, stage: int = 0) -> Moment:
    """The moment at which a rank of pipeline stage `stage` (0 first) has the most memory."""
    return max(moments(model, run, stage), key=lambda moment: moment.bytes)


def fullest(model: ModelShape, run: TrainConfig) -> tuple[int, Moment]:
    """The pipeline stage whose ranks need the most memory, and the moment at which they do."""
    peaks = [(stage, peak(model, run, stage)) for stage in range(run.pipeline_model_parallel_size)]
    return max(peaks, key=lambda one: one[1].bytes)


def moments(model: ModelShape, run: TrainConfig, stage: int = 0) -> list[Moment]:
    """All moments of a rank of pipeline stage `stage`, in their order after the forward pass of the layers."""
    if run.use_torch_fsdp2:
        return list(_moments_of_fsdp2(model, run))
    stages, tensor = run.pipeline_model_parallel_size, run.tensor_model_parallel_size
    parameters = model.parameters_on_stage(stage, stages, tensor, model.expert_model_parallel_size)
    # The optimizer of all experts is sharded over data x context ranks, whether experts are sharded or not.
    updated = model.parameters_on_stage(stage, stages, tensor) if run.shards("optim") > 1 else parameters
    states = list(_states(model, run, parameters, updated))
    inputs = states + list(_inputs(model, run, stage))
    layers = _LayerCounts(model, run)
    found, in_flight = [], _in_flight(run, stage)
    if run.shards("params") > 1:
        whole = f"{parameters:,} parameters x {run.itemsize} bytes that Megatron-FSDP has not sharded yet"
        found.append(Moment(BUILDING, [MemoryItem("whole weights", parameters * run.itemsize, whole)]))
    if stage == stages - 1:
        found.append(Moment(OUTPUT, [*inputs, *layers.kept(in_flight), _output_and_loss(model, run)]))
    found.append(Moment(MLP, [*inputs, *layers.at_work(in_flight, 0), _mlp_backward(model, run)]))
    attention = [_residual(model, run), _attention_backward(model, run)]
    found.append(Moment(ATTENTION, [*inputs, *layers.at_work(in_flight, 1), *attention]))
    if run.on_cpu and run.shards("optim") > run.shards("grads"):
        copy = MemoryItem(REDUCTION, 4 * parameters, "gloo's reduce-scatter copies the gradients")
        found.append(Moment(REDUCTION, [*states, copy]))
    resting = [item for item in states if item.what not in (GATHERED, GRADIENTS)]
    if run.shards("grads") > 1:
        found.append(Moment(GRADIENTS, [*resting, _waiting_gradients(model, run, parameters)]))
    found.append(Moment(OPTIMIZER, [*resting, _update(model, run, updated)]))
    return found


def _moments_of_fsdp2(model: ModelShape, run: TrainConfig) -> Iterator[Moment]:
    """Moments of a rank of FSDP2, which has no pipeline: sharded gradients come, and activations go, layer by layer.

    Between the second layer of the backward pass and the last but one, memory grows or falls evenly.
    """
    parameters = _parameters_of_fsdp2(model, run)
    yield _building_of_fsdp2(model, run, parameters)
    resting, inputs = list(_shards_of_fsdp2(model, run, parameters)), list(_inputs(model, run, 0))
    forward = _whole_of_fsdp2(model, run, 1, 0)[:1]
    yield Moment(OUTPUT, [*resting, *inputs, *forward, *_LayerCounts(model, run).kept(1), _output_and_loss(model, run)])
    last = model.num_layers - 1
    for done in sorted({0, min(1, last), max(0, last - 1), last}):
        for moment in _layer_of_fsdp2(model, run, done):
            yield moment._replace(items=[*resting, *inputs, *moment.items])
    root = _root_of_fsdp2(model, run)
    copies = 8 if run.on_cpu else 4 + run.itemsize  # in float32, and gloo's or those in the dtype
    gathered = _whole_of_fsdp2(model, run, 0, model.num_layers)[0]
    shards = run.shards("grads")
    size = 0 if run.shards_on_host else 4 * parameters // shards
    sharded = MemoryItem("gradients", size, f"4 bytes (float32) / {shards} data x context ranks that shard it")
    whole = MemoryItem(GRADIENTS, root * copies, f"{root:,} numbers of the output layer")
    yield Moment(REDUCTION, [*resting, gathered, sharded, whole])
    yield Moment(OPTIMIZER, [*resting, sharded, _update(model, run, parameters)])


def _building_of_fsdp2(model: ModelShape, run: TrainConfig, parameters: int) -> Moment:
    """The embedding, and the last layer or the output layer, while they are whole; other layers are sharded already."""
    layer, root = model.layer_parameters(run.tensor_model_parallel_size), _root_of_fsdp2(model, run)
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


def _layer_of_fsdp2(model: ModelShape, run: TrainConfig, done: int) -> Iterator[Moment]:
    """Moments of the backward pass of a layer, with `done` layers behind it, without shards and inputs."""
    tensor = run.tensor_model_parallel_size
    layer, ahead = model.layer_parameters(tensor), done < model.num_layers - 1
    layers, residual = _LayerCounts(model, run, done), _residual(model, run)
    whole = _whole_of_fsdp2(model, run, 1 + ahead, done)

    def gradients(numbers: int, formula: str, size: int = run.itemsize) -> MemoryItem:
        return MemoryItem("gradients of a layer", numbers * size, f"{numbers:,} numbers{formula}")

    if run.on_cpu and ahead:
        copy = MemoryItem(
            "gloo's copy", layer * run.itemsize, f"1 layer of {layer:,} parameters x {run.itemsize} bytes"
        )
        yield Moment(GATHER, [*whole, *layers.kept(1), residual, copy])
    yield Moment(MLP, [*whole, *layers.at_work(1, 0), _mlp_backward(model, run)])
    later = [*whole, *layers.at_work(1, 1), residual]
    product = model.hidden_size * (model.queries + 2 * model.keys) // tensor
    yield Moment(ATTENTION, [*later, gradients(layer - product, ""), _attention_backward(model, run)])
    yield Moment(END, [*later, gradients(layer, ""), _first_product(model, run)])
    reduced = _whole_of_fsdp2(model, run, int(ahead), done + 1)
    copies = gradients(layer, ", copied while they are summed", 4 if run.on_cpu else run.itemsize)
    yield Moment(REDUCTION, [*reduced, *_LayerCounts(model, run, done + 1).kept(1), residual, copies])


def _shards_of_fsdp2(model: ModelShape, run: TrainConfig, parameters: int) -> Iterator[MemoryItem]:
    """Weights and moments of a rank; none on the device if they are in host memory."""
    shards = run.shards("params")
    by = f" / {shards} data x context ranks that shard it" if shards > 1 else ""
    there = not run.shards_on_host
    yield MemoryItem("weights", there * parameters * 4 // shards, f"{parameters:,} parameters x 4 bytes{by}")
    yield MemoryItem("optimizer", there * parameters * 8 // shards, f"8 bytes (two moments){by}")


def _whole_of_fsdp2(model: ModelShape, run: TrainConfig, layers: int, done: int) -> list[MemoryItem]:
    """Gathered weights, sharded gradients and whole ones, with `layers` gathered and `done` differentiated."""
    layer = model.layer_parameters(run.tensor_model_parallel_size)
    root, shards = _root_of_fsdp2(model, run), run.shards("grads")
    gathered = layers * layer + root
    formula = f"({layers} layers of {layer:,} parameters + {root:,}) x {run.itemsize} bytes"
    newest = layer if done else 0
    if run.shards_on_host:  # but for what is being copied there
        numbers = newest
    elif run.micro_batches > 1:  # those of micro batches before, to which the newest are added
        numbers = _parameters_of_fsdp2(model, run) + newest
    else:
        numbers = done * layer
    waiting = 4 * layer * (done > 0) + root * run.itemsize
    return [
        MemoryItem(GATHERED, gathered * run.itemsize, formula),
        MemoryItem("gradients", 4 * numbers // shards, f"4 bytes (float32) x {numbers:,} / {shards} ranks"),
        MemoryItem(GRADIENTS, waiting, f"of the layer before in float32, and {root:,} of the output layer"),
    ]


def _parameters_of_fsdp2(model: ModelShape, run: TrainConfig) -> int:
    """All parameters of the model, with the part of each tensor-parallel rank: neither stages nor experts split it."""
    return model.parameters_on_stage(0, 1, run.tensor_model_parallel_size, 1)


def _root_of_fsdp2(model: ModelShape, run: TrainConfig) -> int:
    """Numbers outside of layers that are gathered for a whole step: an embedding of its own is not."""
    layers = model.num_layers * model.layer_parameters(run.tensor_model_parallel_size)
    whole = _parameters_of_fsdp2(model, run) - layers
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


def host_memory(model: ModelShape, run: TrainConfig, stage: int = 0) -> int:
    """Bytes of host memory for what a rank of pipeline stage `stage` offloads."""
    on_device = replace(run, offload_checkpoints=False, offload_kept=False)
    in_flight = _in_flight(run, stage)
    whole = sum(item.bytes for item in _LayerCounts(model, on_device).inputs(in_flight))
    left = sum(item.bytes for item in _LayerCounts(model, run).inputs(in_flight))
    stages, tensor = run.pipeline_model_parallel_size, run.tensor_model_parallel_size
    updated = model.parameters_on_stage(stage, stages, tensor) * run.optimizer_on_host / run.shards("optim")
    parts = _LayerCounts(model, run).offloaded(in_flight, 1) * saved_bytes.offloaded(model, run)[1]
    return whole - left + round(parts + OPTIMIZER_ON_HOST * updated)


# ------------------------------------------------------------------------------------------ weights and the rest


def _states(model: ModelShape, run: TrainConfig, parameters: int, updated: int) -> Iterator[MemoryItem]:
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


def _waiting_gradients(model: ModelShape, run: TrainConfig, parameters: int) -> MemoryItem:
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


def _update(model: ModelShape, run: TrainConfig, updated: int) -> MemoryItem:
    """Adam's own numbers: PyTorch's loop over weights, or its call for all of them; none in Transformer Engine's."""
    shard = round(updated // run.shards("optim") * (1 - run.optimizer_on_host))
    largest = min(shard, model.largest_weight(run.tensor_model_parallel_size))
    size, formula = {
        "cpu": (2 * 4 * largest, f"2 x 4 bytes x {largest:,} parameters, the largest weight"),
        "fused": (4 * shard, f"4 bytes x {shard:,} parameters"),
        "transformer_engine": (0, "in place"),
    }[run.implementation]
    return MemoryItem("Adam's own numbers", size, formula)


def _inputs(model: ModelShape, run: TrainConfig, stage: int) -> Iterator[MemoryItem]:
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
        size = round(_in_flight(run, stage) * run.virtual_stages - last) * _hidden(model, run)
        yield MemoryItem("pipeline outputs", size, "hidden states of each part in flight of a stage")


# ------------------------------------------------------------------------------------------------------- layers


class _LayerCounts:
    """Layers of a stage in a micro batch, `done` of which are differentiated already.

    Attributes:
        whole: those that keep all that their backward pass needs.
        recomputed: the others, in so many `groups`, each of which keeps its input.
        working: layers of a group whose recomputed tensors are there together.
    """

    def __init__(self, model: ModelShape, run: TrainConfig, done: int = 0) -> None:
        self.model, self.run = model, run
        layers = model.num_layers // run.pipeline_model_parallel_size - done
        each = run.recompute_num_layers or 0
        self.recomputed = self.groups = self.working = 0
        if run.recompute_granularity == "full" and each:
            if run.recompute_method == "uniform":
                self.recomputed, self.groups, self.working = layers, -(-layers // each), min(each, layers)
            else:
                self.recomputed = self.groups = min(layers, run.virtual_stages * each)
                # Layers that are kept are freed before the first recomputation.
                self.working = 1 if self.recomputed == layers else 0
        self.whole = layers - self.recomputed

    def kept(self, in_flight: float) -> Iterator[MemoryItem]:
        """What all layers keep from the forward pass, for some micro batches in flight."""
        yield from self.inputs(in_flight)
        yield from self._activations(in_flight * self.whole, in_flight * self.whole)
        yield from self._off_the_device(in_flight, 1)

    def at_work(self, in_flight: float, done: int) -> Iterator[MemoryItem]:
        """The same in the backward pass of the last layer, `done` of whose MLPs are differentiated."""
        again = (saved_bytes.attention_again if done else saved_bytes.mlp_again)(self.model, self.run)
        if again:
            yield MemoryItem("recomputed parts", again, "what a layer's recomputed parts keep while they are at work")
        yield from self.inputs(in_flight, self.working)
        count = in_flight * self.whole + self.working
        yield from self._activations(count, count - done)
        yield from self._off_the_device(in_flight, 1 + done)
        if self.working:
            yield self._ends_at_work()
        if self.groups > 1 and (ahead := saved_bytes.fetched_ahead(self.model, self.run, self.working)):
            yield MemoryItem("fetched ahead", ahead, "what the host had of the layers whose backward pass is the next")

    def _ends_at_work(self) -> MemoryItem:
        """The input of the recomputed layer at work, and the gradient of its output, less what is counted already.

        The checkpoint has that gradient until all of the layer is differentiated. The input is counted with the
        checkpoints on the device, and with a norm that has no float32 copy of it.
        """
        copies = Widths(self.model, self.run).float32_norms and self.run.itemsize < 4
        counted = (not self.run.offload_checkpoints) + (not copies)
        size = (1 - counted) * _hidden(self.model, self.run)
        formula = "input and the gradient of the output, less what is counted already"
        return MemoryItem("ends of the layer at work", size, formula)

    def inputs(self, in_flight: float, at_work: int = 0) -> Iterator[MemoryItem]:
        """What recomputed layers keep on the device. Those at work have taken what was kept of them."""
        if states := saved_bytes.selective_states(self.run, in_flight * self.whole).bytes:
            yield MemoryItem("random states", states, "of each part of a layer that is computed again")
        if not self.groups:
            return
        inputs = saved_bytes.total(saved_bytes.checkpoint_parts(self.model, self.run, self.groups))
        formula = f"inputs of {self.groups} groups of layers x {in_flight:g} micro batches in flight"
        yield MemoryItem("recomputed layers", round(inputs * in_flight), formula)
        if kept := saved_bytes.kept_parts(self.model, self.run):
            layers = in_flight * self.recomputed - at_work
            size = round(layers * saved_bytes.total(kept))
            yield MemoryItem("kept outputs", size, f"{layers:g} layers x {_of_a_token(kept, self.run)}")

    def offloaded(self, in_flight: float, on_device: int) -> float:
        """Layers with parts in host memory: the last never has, and the one before it is fetched meanwhile."""
        return max(0.0, in_flight * self.whole - on_device) if self.run.offload_modules else 0

    def _off_the_device(self, in_flight: float, on_device: int) -> Iterator[MemoryItem]:
        if layers := self.offloaded(in_flight, on_device):
            freed = saved_bytes.offloaded(self.model, self.run)[0]
            names = " ".join(self.run.offload_modules)
            formula = f"{layers:g} layers x tokens x {freed // self.run.tokens:,} bytes of {names}, on the host"
            yield MemoryItem("offloaded activations", -round(layers * freed), formula)

    def _activations(self, attention: float, mlp: float) -> Iterator[MemoryItem]:
        for what, layers, parts in (
            ("attention activations", attention, saved_bytes.attention_parts(self.model, self.run)),
            ("MLP activations", mlp, saved_bytes.mlp_parts(self.model, self.run)),
        ):
            if layers:
                size = round(layers * saved_bytes.total(parts))
                yield MemoryItem(what, size, f"{layers:g} layers x {_of_a_token(parts, self.run)}")


def _of_a_token(parts: list[Part], run: TrainConfig) -> str:
    shown = " + ".join(f"{part.name} {part.bytes // run.tokens:,}" for part in parts if part.bytes >= run.tokens)
    return f"tokens x bytes ({shown})"


def _hidden(model: ModelShape, run: TrainConfig) -> int:
    return run.tokens * run.itemsize * Widths(model, run).hidden


def _in_flight(run: TrainConfig, stage: int) -> float:
    """Micro batches whose activations a stage holds at once; an interleaved schedule counts in parts of a stage."""
    stages, virtual = run.pipeline_model_parallel_size, run.virtual_stages
    if virtual == 1:
        return min(stages - stage, run.micro_batches)
    return min((stages * virtual + stages - 1 - 2 * stage) / virtual, run.micro_batches)


# --------------------------------------------------------------------------------------------- work of a moment


def _output_and_loss(model: ModelShape, run: TrainConfig) -> MemoryItem:
    """The last norm, logits and loss, in the forward pass or in the backward pass of the output layer."""
    w = Widths(model, run)
    weight = w.vocabulary * model.hidden_size
    hidden = _hidden(model, run)
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


def _attention_backward(model: ModelShape, run: TrainConfig) -> MemoryItem:
    return MemoryItem(BUFFERS, attention_buffers(model, run), "peak chunks, partials and kernels at work in a pass")


def _mlp_backward(model: ModelShape, run: TrainConfig) -> MemoryItem:
    """Gradients at work in the MLP of a layer, beyond what it keeps, with those of the layer's output."""
    w = Widths(model, run)
    hidden = _hidden(model, run)
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
    hidden = _hidden(model, run)
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
    hidden, gates = _hidden(model, run), 2 if model.swiglu else 1
    part, weight = w.size * w.inner * run.tokens // chunks, w.size * w.inner * model.hidden_size
    kept = part * (saved_bytes.activation_vectors(model, run) + 1)
    size, newest = hidden - hidden // chunks, 0
    if recomputed_anyway(run) and "mlp" not in run.computed_again:  # a chunk's are complete before they are added
        size, newest = hidden + hidden // chunks, weight
    if chunks > 1:
        size += (gates + 1) * weight
    second, activation, first = kept + part + weight, kept + gates * part + newest, gates * (part + weight) + newest
    return size + max(second, activation, first)


def _residual(model: ModelShape, run: TrainConfig) -> MemoryItem:
    return MemoryItem("residual gradient", _hidden(model, run), "hidden states of the rank")
