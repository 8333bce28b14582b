"""A pass of a plain model on fixed buffers, usually a decode step: from tokens to logits without new tensors."""

import logging
from collections.abc import Iterator

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron.context_parallel.kernels.position.kernel import precision
from megatron.context_parallel.patches.torch_hooks import does_more
from megatron.context_parallel.patches.torch_packed_linear import can_pack, pack
from megatron.context_parallel.runtime.comm.flight_recorder import recorder

from .cached_model import CachedModel
from .decode_layer import Attention, DecodeLayer, LayerBuffers, plain
from .decode_product import PackedWeights, Product
from .step_graph import GraphPool, StepGraph, close


class DecodeStep:
    """Decode steps of a plain model (`decode_layer.plain`) with a certain number of rows. A prefill may be one too.

    A step runs operations of fixed shapes on fixed tensors. It reads nothing back to the host and allocates nothing,
    except in the attention over the ranges of keys.

    Args:
        model: the model; layers: its layers.
        attend: the attention of a step of so many rows.
        rotary: the width of the rotary angles, or 0.
        packed: packed weights, if the weights do not change.
        wanted: int64, the rows whose logits are computed; default: all.
        graphs: for a CUDA graph of the step. Its attention must have fixed tensors (`DecodePages`), and no messages.
    """

    def __init__(
        self,
        model: GPTModel,
        layers: list[DecodeLayer],
        attend: Attention,
        rotary: int,
        packed: PackedWeights | None = None,
        wanted: Tensor | None = None,
        graphs: GraphPool | None = None,
    ) -> None:
        self.model, self.layers, self.attend, self.wanted = model, layers, attend, wanted
        parameter = next(model.parameters())
        self.buffers = LayerBuffers(model.config, attend.size, rotary, parameter.dtype, parameter.device, packed)
        self._inputs = torch.zeros(2, attend.size, dtype=torch.int64, device=parameter.device)
        self.last = self.buffers  # of the rows whose logits are computed
        if wanted is not None:
            self.last = LayerBuffers(model.config, len(wanted), 0, parameter.dtype, parameter.device, packed)
        self.logits = self.last.x.new_zeros(len(self.last.x), model.vocab_size)
        self._to_logits = Product(self.last.normed, self.logits, packed)
        self._graph = StepGraph(graphs) if graphs else None

    def __call__(self, tokens: Tensor, positions: Tensor, angles: Tensor | None) -> Tensor:
        """The logits [wanted rows, vocabulary] of tokens int64 [rows]. The next step overwrites them.

        Args:
            positions: int64 [rows]; angles: the rotary angles of these positions, [rows, 1, 1, d].
        """
        self._inputs[0].copy_(tokens)
        self._inputs[1].copy_(positions)
        if angles is not None:
            self.buffers.set_angles(angles)
        if self._graph is None:
            return self.run()
        recorder.at_layer(0)  # a graph does not tell where it is
        weights = () if self._graph.pool.frozen else tuple(map(_address, self._weights()))
        self._graph(self.run, (precision(self.logits), weights))
        return self.logits

    @torch.inference_mode()
    def run(self) -> Tensor:
        """The operations of a step on the buffers. Without autograd's part they take 4 % less time on a CPU."""
        buffers = self.buffers
        tokens, positions = self._inputs.unbind()
        embedding = self.model.embedding
        torch.index_select(embedding.word_embeddings.weight, 0, tokens, out=buffers.x)
        if embedding.add_position_embedding:
            torch.index_select(embedding.position_embeddings.weight, 0, positions, out=buffers.residual)
            buffers.x.add_(buffers.residual)
        for number, layer in enumerate(self.layers, 1):
            recorder.at_layer(number)
            layer.attend(buffers, self.attend)
            if number == len(self.layers) and self.wanted is not None:
                torch.index_select(buffers.x, 0, self.wanted, out=self.last.x)
                torch.index_select(buffers.attended, 0, self.wanted, out=self.last.attended)
                buffers = self.last
            layer.finish(buffers)
        buffers.norm(self.model.decoder.final_layernorm, buffers.x, buffers.normed)
        self._to_logits(output_weight(self.model))
        return self.logits

    def _weights(self) -> Iterator[Tensor | None]:
        """All tensors of the model that a step reads."""
        embedding = self.model.embedding
        yield embedding.word_embeddings.weight
        if embedding.add_position_embedding:
            yield embedding.position_embeddings.weight
        for layer in self.layers:
            yield from layer.weights()
        norm = self.model.decoder.final_layernorm
        yield from (norm.weight, norm.bias, output_weight(self.model))

    @torch.inference_mode()
    def attend_only(self) -> None:
        """The step of a rank without rows: attention over its keys for the rows of the others."""
        buffers = self.buffers
        for number, layer in enumerate(self.layers, 1):
            recorder.at_layer(number)
            self.attend.write(layer.core, buffers.queries, buffers.turned_k, buffers.v, buffers.by_head)


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


class _StandIn:
    """A stand-in for the attention of one row, which needs no cache."""

    size = 1

    def __call__(self, core: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return q / 2 + (k + v).repeat_interleave(q.shape[2] // k.shape[2], 2)

    def write(self, core: object, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        out.copy_(self(core, q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1))[:, 0])


def plain_layers(cached: CachedModel) -> list[DecodeLayer]:
    """The layers of a plain model; none if the model is not plain.

    One row shows that they compute what the modules compute. If not, or if hooks may change what the modules compute, a
    warning is logged, and there are none.
    """
    model = cached.model
    if not plain(model):
        return []
    layers = [DecodeLayer(layer) for layer in model.decoder.layers]
    if not (does_more(model.embedding) or does_more(model.decoder)) and _equal(cached, layers):
        return layers
    logging.getLogger(__name__).warning("decode steps call the modules of the model, which do more than plain ones")
    return []


@torch.no_grad()
def _equal(cached: CachedModel, layers: list[DecodeLayer]) -> bool:
    """Whether a row has the same logits with the modules of a model and without."""
    model = cached.model
    parameter = next(model.parameters())
    tokens, positions = torch.tensor([[1], [2]], device=parameter.device)
    angles = cached.angles(positions, 4)
    expected = cached(_StandIn(), tokens, positions, angles, torch.zeros_like(tokens))
    step = DecodeStep(model, layers, _StandIn(), 0 if angles is None else angles.shape[-1])
    found = step(tokens, positions, angles)
    vocabulary = getattr(model, "vocabulary", model.vocab_size)
    return close(found[:, :vocabulary], expected[:, :vocabulary])


def packed_weights(model: GPTModel, layers: list[DecodeLayer]) -> PackedWeights:
    """Copies of the weights of a plain model that make products of a few rows faster; none where there is no gain."""
    weights = [linear.weight for layer in layers for linear in layer.linears] + [output_weight(model)]
    return {weight: pack(weight) for weight in weights if can_pack(weight)} if layers else {}


def output_weight(model: GPTModel) -> Tensor:
    """The weight of the output layer, which may be that of the embedding."""
    if model.share_embeddings_and_output_weights:
        return model.shared_embedding_or_output_weight()
    return model.output_layer.weight
