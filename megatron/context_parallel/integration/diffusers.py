"""HuggingFace diffusers: the attention of a diffusion transformer, computed by all ranks of a context group."""

from functools import partial
from typing import Any

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
    has_plan,
    is_parallel,
    new_backend,
    set_backend,
    takes_backend,
)


def use_context_parallel(model: ModelMixin, cp: ContextParallel) -> None:
    """Makes the ranks of `cp` share each sequence of the model. Every rank calls the model with the same inputs.

    The model's own plan (`_cp_plan`) says which inputs are cut and which outputs are gathered, so every rank gets the
    whole output. Each token sees all tokens, so all strategies and layouts are exact. In training each rank has a part
    of the gradients of the weights; the sum over the context group is the gradient.

    Args:
        model: a transformer of diffusers, such as `pipeline.transformer`.
        cp: the context group.

    Raises:
        UsageError: the model has no plan, is parallel already, or has an attention that takes no other backend. A call
            of the model raises it for a mask, causal attention or dropout, and if another backend was set since.
    """
    name = type(model).__name__
    if not has_plan(model):
        raise UsageError(f"{name}: has no _cp_plan, which says what to cut; use a model that has one")
    if is_parallel(model):
        raise UsageError(f"{name}: is parallel already; leave out enable_parallelism() and a parallel_config")
    modules = [m for m in model.modules() if isinstance(m, Attention | MochiAttention | AttentionModuleMixin)]
    for module in modules:
        if not takes_backend(module.processor):
            raise UsageError(f"{name}: {type(module.processor).__name__} takes no attention backend; use another model")
    backend = _new_backend(cp)
    for module in modules:
        set_backend(module.processor, backend)
    model.register_forward_pre_hook(partial(_check_backends, backend, modules))
    if cp.n > 1:
        cut_by_plan(model, DeviceMesh.from_group(cp.group, model.device.type))


def _check_backends(backend: AttentionBackendName, modules: list[Any], model: ModelMixin, args: tuple) -> None:
    for module in modules:
        if (now := backend_of(module.processor)) is not backend:
            name = type(model).__name__
            raise UsageError(f"{name}: attention backend {now} was set since; call set_attention_backend() before")


def _new_backend(cp: ContextParallel) -> AttentionBackendName:
    """A backend of diffusers, beside those that it names, that computes with `cp`."""

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
            raise UsageError("attn_mask: a rank has a part of it only; give prompts of one length, without a mask")
        if dropout_p or is_causal:
            raise UsageError(f"dropout_p {dropout_p}, is_causal {is_causal}: not supported here; give 0.0 and False")
        out = context_parallel_attention(query, key, value, cp, causal=False, scale=scale, tensor_layout="bshd")
        assert isinstance(out, Tensor)  # the log-sum-exp was not asked for
        return out

    return new_backend(f"context_parallel_{cp.handle}", attend)
