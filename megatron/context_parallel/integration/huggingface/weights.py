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

from ..model_config import ModelConfig
from .folder import SafetensorsFolder


@dataclass(frozen=True)
class Weight:
    """A weight of GPTModel, and the HuggingFace weights that it is made of.

    This class copies a single weight, and stacks several along the rows: `linear_fc1` is [gate; up].

    Attributes:
        ours, theirs: names; the first `{}` is the layer and the second the expert, both from 0.
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


class OfExperts(Weight):
    """A weight of an expert. HuggingFace has those of all experts of a layer in one, of which each is a row."""

    def split(self, ours: Tensor, config: TransformerConfig) -> list[Tensor]:
        return [ours]


class Gates(OfExperts):
    """Gate and up projection of an expert, [gate; up], or their biases. Theirs alternate, and are transposed."""

    def join(self, theirs: list[Tensor], config: TransformerConfig) -> list[Tensor]:
        rows = theirs[0].t() if theirs[0].ndim > 1 else theirs[0]
        return [rows[0::2], rows[1::2]]

    def split(self, ours: Tensor, config: TransformerConfig) -> list[Tensor]:
        rows = torch.stack(ours.chunk(2), dim=1).flatten(0, 1)
        return [rows.t() if rows.ndim > 1 else rows]


class Transposed(OfExperts):
    """The down projection of an expert."""

    def join(self, theirs: list[Tensor], config: TransformerConfig) -> list[Tensor]:
        return [theirs[0].t()]

    def split(self, ours: Tensor, config: TransformerConfig) -> list[Tensor]:
        return [ours.t()]


_OURS, _THEIRS = "decoder.layers.{}", "model.layers.{}"
_ATTENTION, _MLP = f"{_THEIRS}.self_attn", f"{_THEIRS}.mlp"
_EXPERT, _THEIR_EXPERT = f"{_OURS}.mlp.experts.local_experts.{{}}", f"{_MLP}.experts.{{}}"
_NORM_BEFORE_MLP = f"{_OURS}.pre_mlp_layernorm.weight"
_QKV = f"{_OURS}.self_attention.linear_qkv"
EMBEDDING = Table("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), along=0)
OUTPUT = Table("output_layer.weight", ("lm_head.weight",), along=0)
_ALL = (
    EMBEDDING,
    Weight(f"{_OURS}.input_layernorm.weight", (f"{_THEIRS}.input_layernorm.weight",)),
    QKV(f"{_QKV}.weight", tuple(f"{_ATTENTION}.{x}_proj.weight" for x in "qkv"), along=0),
    QKV(f"{_QKV}.bias", tuple(f"{_ATTENTION}.{x}_proj.bias" for x in "qkv"), along=0),
    Weight(f"{_OURS}.self_attention.q_layernorm.weight", (f"{_ATTENTION}.q_norm.weight",)),
    Weight(f"{_OURS}.self_attention.k_layernorm.weight", (f"{_ATTENTION}.k_norm.weight",)),
    Weight(f"{_OURS}.self_attention.core_attention.softmax_offset", (f"{_ATTENTION}.sinks",), along=0),
    Weight(f"{_OURS}.self_attention.linear_proj.weight", (f"{_ATTENTION}.o_proj.weight",), along=1),
    Weight(f"{_OURS}.self_attention.linear_proj.bias", (f"{_ATTENTION}.o_proj.bias",)),
    Weight(_NORM_BEFORE_MLP, (f"{_THEIRS}.post_attention_layernorm.weight",)),
    Weight(
        f"{_OURS}.mlp.linear_fc1.weight",
        (f"{_MLP}.gate_proj.weight", f"{_MLP}.up_proj.weight"),
        along=0,
    ),
    Weight(f"{_OURS}.mlp.linear_fc2.weight", (f"{_MLP}.down_proj.weight",), along=1),
    Weight("decoder.final_layernorm.weight", ("model.norm.weight",)),
    OUTPUT,
)
_QWEN_EXPERTS = (
    Weight(f"{_OURS}.mlp.router.weight", (f"{_MLP}.gate.weight",)),
    Weight(
        f"{_EXPERT}.linear_fc1.weight",
        (f"{_THEIR_EXPERT}.gate_proj.weight", f"{_THEIR_EXPERT}.up_proj.weight"),
    ),
    Weight(f"{_EXPERT}.linear_fc2.weight", (f"{_THEIR_EXPERT}.down_proj.weight",)),
)
_GPT_OSS_EXPERTS = (
    Weight(f"{_OURS}.mlp.router.weight", (f"{_MLP}.router.weight",)),
    Weight(f"{_OURS}.mlp.router.bias", (f"{_MLP}.router.bias",)),
    Gates(f"{_EXPERT}.linear_fc1.weight", (f"{_MLP}.experts.gate_up_proj",)),
    Gates(f"{_EXPERT}.linear_fc1.bias", (f"{_MLP}.experts.gate_up_proj_bias",)),
    Transposed(f"{_EXPERT}.linear_fc2.weight", (f"{_MLP}.experts.down_proj",)),
    OfExperts(f"{_EXPERT}.linear_fc2.bias", (f"{_MLP}.experts.down_proj_bias",)),
)
_GEMMA_NORMS = (
    Weight(f"{_OURS}.self_attention.linear_proj.post_norm.weight", (f"{_THEIRS}.post_attention_layernorm.weight",)),
    Weight(_NORM_BEFORE_MLP, (f"{_THEIRS}.pre_feedforward_layernorm.weight",)),
    Weight(f"{_OURS}.mlp.linear_fc2.post_norm.weight", (f"{_THEIRS}.post_feedforward_layernorm.weight",)),
)


def _weights_of(config: TransformerConfig) -> dict[str, Weight]:
    """The map of a model of this configuration, by our names."""
    special: tuple[Weight, ...] = ()
    if config.num_moe_experts:
        special = _GPT_OSS_EXPERTS if config.add_bias_linear else _QWEN_EXPERTS
    elif isinstance(config, ModelConfig) and config.sandwich_norm:
        special = _GEMMA_NORMS
    return {weight.ours: weight for weight in (*_ALL, *special)}


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
    """Reject a folder that lacks a weight of `model`, has an unknown one, or has two where config.json ties them.

    Raises:
        UsageError: a weight is missing, unknown or not tied; the message names it.
    """
    unread = {name for name in source.names if not _NOT_WEIGHTS.fullmatch(name)}
    (embedding,), (output,) = EMBEDDING.theirs, OUTPUT.theirs
    if model.share_embeddings_and_output_weights and output in unread and embedding in unread:
        if not source.equal(output, embedding):  # transformers does not tie them then, whatever config.json says
            why = (
                f"{output} and {embedding} differ, and its config.json ties them; correct tie_word_embeddings to false"
            )
            raise UsageError(f"{source.folder}: {why}")
        unread.discard(output)  # some folders contain the tied weight twice
    for name, _ in model.named_parameters():
        weight, numbers = _find(name, model.config)
        for theirs in weight.theirs:
            source.check_has(theirs.format(*numbers))
            unread.discard(theirs.format(*numbers))
    if unread:
        more = f" and {len(unread) - 1} more weights" if len(unread) > 1 else ""
        raise UsageError(f"{source.folder}: {min(unread)}{more}, which the model of its config.json does not have")


def fill(name: str, parameter: Tensor, source: SafetensorsFolder, config: TransformerConfig, vocabulary: int) -> None:
    """Load this tensor-parallel rank's part of the weight `name` of a GPTModel from a HuggingFace folder.

    Raises:
        UsageError: the folder lacks a weight for it, or has one of another shape.
    """
    weight, numbers = _find(name, config)
    names = [theirs.format(*numbers) for theirs in weight.theirs]
    if isinstance(weight, OfExperts):
        assert config.num_moe_experts
        theirs = [source.read_row(name, numbers[1], config.num_moe_experts) for name in names]
    else:
        theirs = [source.read(name) for name in names]
    _fill(parameter, weight.join(theirs, config), weight, vocabulary)


def _find(name: str, config: TransformerConfig) -> tuple[Weight, list[int]]:
    """The map entry of one of our weights, and the numbers in its name: its layer and its expert, if it has them."""
    numbers = [int(number) for number in re.findall(r"\.(\d+)(?=\.)", name)]
    found = _weights_of(config).get(re.sub(r"\.\d+(?=\.)", ".{}", name))
    if found is None:
        raise UsageError(f"{name}: no supported HuggingFace family has this weight")
    return found, numbers


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

    Where HuggingFace has the weights of all experts in one, those of a layer are in memory at a time.

    Raises:
        UsageError: a weight that no supported family has.
    """
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in weights:
        weight, numbers = _find(name, config)
        whole = tensor[:vocabulary] if isinstance(weight, Table) else tensor
        for pattern, part in zip(weight.theirs, weight.split(whole, config), strict=True):
            theirs = pattern.format(*numbers)
            if not isinstance(weight, OfExperts):
                yield theirs, part
                continue
            experts.setdefault(theirs, []).append(part)
            if len(experts[theirs]) == config.num_moe_experts:
                yield theirs, torch.stack(experts.pop(theirs))
