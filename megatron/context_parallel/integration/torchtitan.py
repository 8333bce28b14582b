"""torchtitan: its models and its trainer with our attention.

The replaced names are not public, so only tested releases are accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import spmd_types
import torch
import torch.distributed as dist
import torchtitan
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan import trainer
from torchtitan.distributed import ParallelDims
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from megatron.context_parallel.attention.api import context_parallel_attention
from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.torchtitan import (
    CHECKED,
    attention_as_it_is,
    cut_batches_with,
    model_class,
    save_results_of,
)
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.placement import Placement

from .batch import shard_batch

TRIED = CHECKED["torchtitan"] + "."
Place = Callable[[Documents, int], Placement]


class _Context(NamedTuple):
    cp: ContextParallel
    place: Place | None


_contexts: dict[dist.ProcessGroup, _Context] = {}  # the context groups of the models created so far
Config = TypeVar("Config", bound=trainer.Trainer.Config)


class ContextParallelAttention(Module):
    """Replaces torchtitan's FlexAttention. The documents of a batch are passed as its `attention_masks`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    cp: ContextParallel | None = None
    _sharding_config: ShardingConfig | None

    def __init__(self, config: Config) -> None:
        super().__init__()

    def share(self, cp: ContextParallel) -> None:
        """Makes it compute with the ranks of `cp`. Call it before `parallelize`, which would gather keys and values."""
        self.cp = cp
        if (given := self._sharding_config) is not None:
            self._sharding_config = _without_gathering(given)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Documents | None = None,
        scale: float | None = None,
        **others: object,
    ) -> Tensor:
        """[b, s, heads, d] of this rank's tokens to [b, s, heads, dv].

        Raises:
            UsageError: anything else than causal attention within documents is requested.
        """
        if wrong := [name for name in ("score_mod", "out_transform") if others.get(name) is not None]:
            raise UsageError(f"{wrong[0]}: not supported under context parallelism; use a model without it")
        if self.cp is None:
            raise UsageError("the model was not created by its parallelize_fn; give its config to torchtitan's Trainer")
        with spmd_types.no_typecheck():
            out = context_parallel_attention(
                q_BLNH, k_BLNH, v_BLNH, self.cp, documents=attention_masks, scale=scale, tensor_layout="bshd"
            )
        assert isinstance(out, Tensor)  # without the log-sum-exp
        return out


def use_context_parallel(config: Config, strategy: str, place: Place | None = None) -> Config:
    """Replaces the context parallelism of a torchtitan run with ours. Call it in your function of a config registry.

    Every rank keeps its tokens in the layout of the strategy. As in torchtitan, attention is causal within documents,
    which the positions of a batch define.

    Args:
        config: the config of a decoder with torchtitan's FlexAttention, such as `llama3_8b()`. It is modified in place.
        strategy: `--cp-strategy`.
        place: decides the placement of each batch from its documents, for so many context ranks. Default: tokens are
            where the layout of the strategy says.

    Returns:
        `config`.

    Raises:
        UsageError: an untested release, an unknown strategy, or a model without FlexAttention or with its own masks.
            The run raises it for settings that do not work with context parallelism.
    """
    if not torchtitan.__version__.startswith(TRIED):
        raise UsageError(f"torchtitan {torchtitan.__version__}: not tested; install torchtitan=={TRIED}0")
    parse_spec(strategy)  # raises UsageError for an invalid spec
    spec = config.model_spec
    _replace_attention(spec.model)
    spec.parallelize_fn = _parallelize_with(spec.parallelize_fn, strategy, place)
    cut_batches_with(cut)
    save_results_of(torch.ops.context_parallel.attention.default)
    return config


def _replace_attention(model: Any) -> None:
    """Replaces every attention in a model's config with ours."""
    name = type(model).__qualname__.removesuffix(".Config")
    if not isinstance(model, Decoder.Config):
        raise UsageError(f"{name}: not a torchtitan decoder; use a language model, such as llama3")
    if model_class(model).get_attention_masks is not Decoder.get_attention_masks:
        raise UsageError(f"{name}: has its own attention masks; use a model with causal masks, such as llama3")
    for layer in model.layers:
        inner = layer.attention.inner_attention
        if type(inner) is not FlexAttention.Config:
            kind = type(inner).__qualname__.removesuffix(".Config")
            raise UsageError(f"{name}: its attention is {kind}; give model_registry(..., attn_backend='flex')")
        layer.attention.inner_attention = ContextParallelAttention.Config(sharding_config=inner.sharding_config)


def _parallelize_with(theirs: Callable, strategy: str, place: Place | None) -> Callable:
    """Wraps a model's `parallelize_fn`: it first makes attention context parallel."""

    def parallelize(
        model: nn.Module, *, parallel_dims: ParallelDims, training: Any, parallelism: Any, **others: Any
    ) -> nn.Module:
        _check(parallel_dims, training, parallelism)
        cp = ContextParallel(strategy, group=parallel_dims.get_mesh("cp"))
        before, placed_by = _contexts.setdefault(cp.group, _Context(cp, place))
        if (cp.layout, cp.chunks, place) != (before.layout, before.chunks, placed_by):
            by = " and another placement" if place != placed_by else ""
            why = f"these ranks already run a model with --cp-strategy {before.choice.spec}{by}; give the same"
            raise UsageError(f"--cp-strategy {strategy}: {why}")
        cp.positions(training.seq_len)  # raises UsageError for an unsuitable length
        for module in model.modules():
            if isinstance(module, ContextParallelAttention):
                module.share(cp)
        with attention_as_it_is(theirs):
            return theirs(model, parallel_dims=parallel_dims, training=training, parallelism=parallelism, **others)

    return parallelize


def _check(parallel_dims: ParallelDims, training: Any, parallelism: Any) -> None:
    """Raises UsageError for settings of torchtitan that our context parallelism does not support."""
    balancer = parallelism.context_parallel_load_balancer
    if not parallel_dims.cp_enabled:
        raise UsageError("--parallelism.context_parallel_degree 1: 1 rank cannot share a sequence; give 2 or more")
    if parallel_dims.pp_enabled:
        raise UsageError(f"--parallelism.pipeline_parallel_degree {parallel_dims.pp}: not tested; give 1")
    if balancer != "headtail":
        raise UsageError(
            f"--parallelism.context_parallel_load_balancer {balancer}: the strategy decides which tokens a rank has; "
            "leave it out"
        )
    if not training.disable_cuda_graphs:
        raise UsageError("CUDA graphs: not supported with context parallelism; give --training.disable_cuda_graphs")


def cut(
    inputs: Tensor,
    labels: Tensor,
    extra_kwargs: dict[str, Any],
    cp_mesh: DeviceMesh,
    device: torch.device,
    load_balancer_type: str | None = "headtail",
    ptrr_mask_key: str | None = None,
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Replaces `prepare_context_parallel_input`: this rank's part of a batch.

    Args:
        inputs: int64 [b, length].
        labels: int64 [b, length].
        extra_kwargs: `positions` int64 [b, length], which start at 0 in each document.
        cp_mesh: the ranks that share the batch.
        device: not used.
        load_balancer_type: not used, because the strategy decides which tokens a rank has.
        ptrr_mask_key: not used.

    Returns:
        Inputs, labels, and a dict of positions [b, length / n] and the documents as `attention_masks`. If batches are
            placed, the samples are laid end to end, [1, b * length / n].

    Raises:
        UsageError: no positions, unknown tensors in the batch, or a model that was not created for these ranks.
    """
    if unknown := extra_kwargs.keys() - {"positions"}:
        raise UsageError(f"{min(unknown)} in the batch: not supported; give input, positions and labels only")
    if (positions := extra_kwargs.get("positions")) is None:
        raise UsageError("positions: missing in the batch; use a data loader that gives them, such as torchtitan's own")
    if (context := _contexts.get(cp_mesh.get_group())) is None:
        raise UsageError("the model was not created for these ranks by use_context_parallel; give it to Trainer")
    starts = positions == 0
    cp, place = context
    documents = Documents(starts.cumsum(1)) if place or starts[:, 1:].any() else None
    if documents and place:
        documents = documents.placed(place(documents, cp.n // cp.head_parallel_size))
    local = shard_batch({"inputs": inputs, "labels": labels, "positions": positions}, cp, documents)
    return local["inputs"], local["labels"], {"positions": local["positions"], "attention_masks": documents}


def _without_gathering(given: ShardingConfig) -> ShardingConfig:
    """The sharding of attention if a rank passes only its own keys and values: no tensor is redistributed."""
    sharded = given.in_src_shardings or {}
    whole = LocalMapConfig(in_grad_placements=tuple(sharded.values()))
    return replace(given, in_dst_shardings=sharded, local_map=whole)
