"""HuggingFace diffusers: the attention of a diffusion transformer, computed by all ranks of a context group."""

from functools import partial
from typing import Any

import torch
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.attention_processor import Attention, MochiAttention
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from megatron.context_parallel.attention.api import context_parallel_attention
from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.diffusers import (
    backend_of,
    cut_by_plan,
    gathers_in_layers,
    has_plan,
    is_parallel,
    new_backend,
    set_backend,
    takes_backend,
)


def use_context_parallel(model: ModelMixin, cp: ContextParallel) -> None:
    """Shards each sequence of the model over the ranks of `cp`. Every rank calls the model with the same inputs.

    The model's own plan (`_cp_plan`) decides which inputs are sharded and which outputs are gathered. So every rank
    gets the whole output. Each token sees all tokens, so all strategies and layouts are exact. In training each rank
    has partial gradients of the weights; their sum over the context group is the gradient.

    Args:
        model: a transformer of diffusers, such as `pipeline.transformer`.
        cp: the context group.

    Raises:
        UsageError: the model has no plan, is already parallel, or has an attention that supports no other backend or
            counts tokens (Helios that amplifies its history). A call of the model raises it for a mask, causal
            attention, dropout, a cache of keys or the samples of a ControlNet, if another backend was set later, and
            with gradients if the plan gathers tokens within layers (Helios).
    """
    name = type(model).__name__
    if not has_plan(model):
        raise UsageError(f"{name}: has no _cp_plan, which tells how to shard its inputs; use a model that has one")
    if is_parallel(model):
        raise UsageError(f"{name}: is already parallel; leave out enable_parallelism() and parallel_config")
    modules = [m for m in model.modules() if isinstance(m, Attention | MochiAttention | AttentionModuleMixin)]
    for module in modules:
        if getattr(module, "is_amplify_history", False):
            raise UsageError(f"{name}: is_amplify_history finds the history in whole sequences only; give False")
        if not takes_backend(module.processor):
            kind = type(module.processor).__name__
            raise UsageError(f"{name}: {kind} does not support attention backends; use another model")
    backend = _new_backend(cp)
    for module in modules:
        set_backend(module.processor, backend)
    model.register_forward_pre_hook(partial(_check_call, backend, modules), with_kwargs=True)
    if cp.n > 1:
        cut_by_plan(model, DeviceMesh.from_group(cp.group, model.device.type))


def _check_call(
    backend: AttentionBackendName, modules: list[Any], model: ModelMixin, args: tuple, kwargs: dict[str, Any]
) -> None:
    name = type(model).__name__
    if kwargs.get("kv_cache_mode") is not None:
        raise UsageError(f"kv_cache_mode {kwargs['kv_cache_mode']}: a rank has a part of the reference only; give None")
    if is_parallel(model):
        _check_plan(model, kwargs)
    for module in modules:
        if (now := backend_of(module.processor)) is not backend:
            raise UsageError(f"{name}: attention backend {now} was set later; call set_attention_backend() first")


def _check_plan(model: ModelMixin, kwargs: dict[str, Any]) -> None:
    """Raises UsageError for a call for which the plan of the model is wrong or incomplete."""
    name = type(model).__name__
    for samples in ("controlnet_block_samples", "controlnet_single_block_samples"):
        if kwargs.get(samples) is not None:
            raise UsageError(f"{samples}: the plan of {name} does not shard them; leave them out")
    if torch.is_grad_enabled() and gathers_in_layers(model):
        # A rank has the whole gradients of weights that compute with gathered tokens, and a part of the others'.
        raise UsageError(f"{name}: its plan gathers tokens within layers, where gradients differ; use torch.no_grad()")


def _new_backend(cp: ContextParallel) -> AttentionBackendName:
    """An additional attention backend of diffusers, which computes with `cp`."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """[b, s, heads, d] of this rank's tokens to [b, s, heads, d]."""
        if attn_mask is not None:
            raise UsageError("attn_mask: a rank has only a part of it; give prompts of one length, without a mask")
        if dropout_p or is_causal:
            raise UsageError(f"dropout_p {dropout_p}, is_causal {is_causal}: not supported; give 0.0 and False")
        out = context_parallel_attention(query, key, value, cp, causal=False, scale=scale, tensor_layout="bshd")
        assert isinstance(out, Tensor)  # without the log-sum-exp
        return out

    return new_backend(f"context_parallel_{cp.handle}", attend)
