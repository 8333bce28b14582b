"""What the layers of a stage keep for their backward pass: whole layers, recomputed ones, and parts in host memory."""

from collections.abc import Iterator

from . import saved_bytes
from .model_shape import ModelShape
from .moment import MemoryItem
from .saved_bytes import Part, Widths
from .train_config import TrainConfig


class LayersMemory:
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
        size = (1 - counted) * hidden_bytes(self.model, self.run)
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


def hidden_bytes(model: ModelShape, run: TrainConfig) -> int:
    """Of the hidden states of a rank."""
    return run.tokens * run.itemsize * Widths(model, run).hidden


def micro_batches_in_flight(run: TrainConfig, stage: int) -> float:
    """Micro batches whose activations a stage holds at once; an interleaved schedule counts in parts of a stage."""
    stages, virtual = run.pipeline_model_parallel_size, run.virtual_stages
    if virtual == 1:
        return min(stages - stage, run.micro_batches)
    return min((stages * virtual + stages - 1 - 2 * stage) / virtual, run.micro_batches)
