"""Converts HuggingFace weights to those of megatron-core's GPTModel, and back: the map of names and shapes."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.progress import tracked

from .folder import SafetensorsFolder


@dataclass(frozen=True)
class Weight:
    """A weight of GPTModel, and the HuggingFace weights that it is made of.

    This class copies a single weight, and stacks several along the rows: `linear_fc1` is [gate; up].

    Attributes:
        ours, theirs: names; `{}` is the layer, from 0.
        along: the dimension that tensor parallelism splits; None: every rank has the whole weight.
    """

    ours: str
    theirs: tuple[str, ...]
    along: int | None = None

    def join(self, theirs: list[Tensor], config: TransformerConfig) -> list[Tensor]:
        """The parts of our weight, stacked along the rows. Tensor parallelism splits each of them."""
        return theirs

    def split(self, ours: Tensor, config: TransformerConfig) -> list[Tensor]:
        """The HuggingFace weights in our whole weight: the inverse of `join`."""
        return list(ours.chunk(len(self.theirs)))


class QKV(Weight):
    """Query, key and value projections, packed by key/value head: rows of its queries, then its key, then its value."""

    def join(self, theirs: list[Tensor], config: TransformerConfig) -> list[Tensor]:
        groups = [x.unflatten(0, (config.num_query_groups, -1)) for x in theirs]
        return [torch.cat(groups, dim=1).flatten(0, 1)]

    def split(self, ours: Tensor, config: TransformerConfig) -> list[Tensor]:
        width = config.kv_channels
        queries = config.num_attention_heads // config.num_query_groups * width
        parts = ours.unflatten(0, (config.num_query_groups, -1)).split([queries, width, width], dim=1)
        return [part.flatten(0, 1) for part in parts]


class Table(Weight):
    """A row for each token. Ours is padded with rows of zeros to a multiple of the tensor-parallel size."""


_ATTENTION, _MLP = "model.layers.{}.self_attn", "model.layers.{}.mlp"
OUTPUT = Table("output_layer.weight", ("lm_head.weight",), along=0)
WEIGHTS = (
    Table("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), along=0),
    Weight("decoder.layers.{}.input_layernorm.weight", ("model.layers.{}.input_layernorm.weight",)),
    QKV(
        "decoder.layers.{}.self_attention.linear_qkv.weight",
        tuple(f"{_ATTENTION}.{x}_proj.weight" for x in "qkv"),
        along=0,
    ),
    Weight("decoder.layers.{}.self_attention.q_layernorm.weight", (f"{_ATTENTION}.q_norm.weight",)),
    Weight("decoder.layers.{}.self_attention.k_layernorm.weight", (f"{_ATTENTION}.k_norm.weight",)),
    Weight("decoder.layers.{}.self_attention.linear_proj.weight", (f"{_ATTENTION}.o_proj.weight",), along=1),
    Weight("decoder.layers.{}.pre_mlp_layernorm.weight", ("model.layers.{}.post_attention_layernorm.weight",)),
    Weight(
        "decoder.layers.{}.mlp.linear_fc1.weight",
        (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
        along=0,
    ),
    Weight("decoder.layers.{}.mlp.linear_fc2.weight", (f"{_MLP}.down_proj.weight",), along=1),
    Weight("decoder.final_layernorm.weight", ("model.norm.weight",)),
    OUTPUT,
)
_NOT_WEIGHTS = re.compile(r".*\.rotary_emb\.inv_freq")  # older folders contain this RoPE table


@torch.no_grad()
def load_weights(model: GPTModel, folder: Path, vocabulary: int) -> None:
    """Load the weights in `folder` into `model`; each tensor-parallel rank loads its slices.

    Besides the model, only one weight of the folder is in memory at a time. Weights are cast to the model's dtype.

    Args:
        model: all layers of the model; the output layer must be tied exactly if the folder's config says so.
        folder: config.json and weights as .safetensors files.
        vocabulary: the number of rows of the tables that are tokens; further rows become 0.

    Raises:
        UsageError: the folder has no safetensors, lacks a weight, or has an unknown one or one of another shape.
    """
    source = SafetensorsFolder(folder)
    check_names(model, source)
    for name, parameter in tracked([*model.named_parameters()], "loading weights"):
        fill(name, parameter, source, model.config, vocabulary)


def check_names(model: GPTModel, source: SafetensorsFolder) -> None:
    """Reject a folder that lacks a weight of `model`, or has an unknown one.

    Raises:
        UsageError: a weight is missing or unknown; the message names it.
    """
    unread = {name for name in source.names if not _NOT_WEIGHTS.fullmatch(name)}
    if model.share_embeddings_and_output_weights:
        unread.discard(OUTPUT.theirs[0])  # some folders contain the tied weight twice
    for name, _ in model.named_parameters():
        weight, layer = _find(name)
        for theirs in weight.theirs:
            source.check_has(theirs.format(layer))
            unread.discard(theirs.format(layer))
    if unread:
        more = f" and {len(unread) - 1} more weights" if len(unread) > 1 else ""
        raise UsageError(f"{source.folder}: {min(unread)}{more}, which the model of its config.json does not have")


def fill(name: str, parameter: Tensor, source: SafetensorsFolder, config: TransformerConfig, vocabulary: int) -> None:
    """Load this tensor-parallel rank's part of the weight `name` of a GPTModel from a HuggingFace folder.

    Raises:
        UsageError: the folder lacks a weight for it, or has one of another shape.
    """
    weight, layer = _find(name)
    parts = weight.join([source.read(theirs.format(layer)) for theirs in weight.theirs], config)
    _fill(parameter, parts, weight, vocabulary)


def _find(name: str) -> tuple[Weight, int]:
    """The map entry of one of our weights, and its layer (0 outside of layers)."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    pattern = name.replace(layer[0], ".layers.{}.") if layer else name
    found = next((weight for weight in WEIGHTS if weight.ours == pattern), None)
    if found is None:
        raise UsageError(f"{name}: no supported HuggingFace family has this weight")
    return found, int(layer[1]) if layer else 0


def _fill(parameter: Tensor, parts: list[Tensor], weight: Weight, vocabulary: int) -> None:
    whole = list(parameter.shape)
    along = weight.along
    ranks = 1
    rank = 0
    if along is not None:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        whole[along] *= ranks
    if isinstance(weight, Table):
        _check_shape(weight, parts[0], [vocabulary, *whole[1:]])
        parts = [torch.nn.functional.pad(parts[0], (0, 0, 0, whole[0] - vocabulary))]
    for part in parts:
        _check_shape(weight, part, [whole[0] // len(parts), *whole[1:]])
    mine = [part.chunk(ranks, along or 0)[rank] for part in parts]
    parameter.copy_(torch.cat(mine) if len(mine) > 1 else mine[0])


def _check_shape(weight: Weight, found: Tensor, expected: list[int]) -> None:
    if list(found.shape) != expected:
        names = " + ".join(weight.theirs)
        raise UsageError(f"{names}: shape {list(found.shape)} in the file, {expected} by config.json")


def to_huggingface(
    weights: Iterable[tuple[str, Tensor]], config: TransformerConfig, vocabulary: int
) -> Iterator[tuple[str, Tensor]]:
    """HuggingFace's names and weights for the whole weights of a GPTModel (tensor-parallel size 1), given by name.

    Raises:
        UsageError: a weight that no supported family has.
    """
    for name, tensor in weights:
        weight, layer = _find(name)
        whole = tensor[:vocabulary] if isinstance(weight, Table) else tensor
        for theirs, part in zip(weight.theirs, weight.split(whole, config), strict=True):
            yield theirs.format(layer), part
