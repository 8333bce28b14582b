"""HuggingFace transformers: our attention for its models, and batches sharded over a context group."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from megatron.context_parallel.attention.api import context_parallel_attention
from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.transformers import (
    attention_of,
    replace_set_attn_implementation,
    set_attn_implementation,
)
from megatron.context_parallel.tokens.documents import Documents, Sequences
from megatron.context_parallel.tokens.layout import unshard
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.placement import Placement

from .batch import shard_batch as shard_tensors
from .transformers_mask import MaskFunction, mask_of
from .transformers_model import check_adapters, check_model

NAME = "context_parallel"
IGNORED = -100  # the label of a token without a loss
_contexts: list[ContextParallel] = []  # the last registered one
_placed: WeakKeyDictionary[ContextParallel, Documents] = WeakKeyDictionary()  # of the call that runs
_registered: WeakKeyDictionary[torch.nn.Module, ContextParallel] = WeakKeyDictionary()  # by module of a model
_USE_HELPER = "give model(**shard_batch(cp, batch), use_cache=False)"


def register(cp: ContextParallel, model: PreTrainedModel | None = None) -> None:
    """Registers attention over a context group for `model.set_attn_implementation("context_parallel")`.

    A model uses the context group that was registered last when its attention was set. Its batches are checked: labels
    that were sharded before they were shifted would be wrong at the end of a chunk, and only the model sees them.

    Args:
        cp: the context group.
        model: a transformers model, or a wrapper of one (peft), whose attention is set at once.

    Raises:
        UsageError: the model does not support other attention functions, or mixes tokens outside of attention.
            `set_attn_implementation` raises the same.
    """
    if model is not None:
        check_adapters(model)  # a wrapper of peft knows adapters that the model itself does not
    _contexts[:] = [cp]
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    replace_set_attn_implementation(_set_attn_implementation)
    if model is not None:
        model.set_attn_implementation(NAME)


@wraps(set_attn_implementation)
def _set_attn_implementation(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    asked = args[0] if args else kwargs.get("attn_implementation")
    before = attention_of(self.config)
    set_attn_implementation(self, *args, **kwargs)
    if asked == NAME:
        try:
            check_model(self, NAME)
        except UsageError:
            set_attn_implementation(self, before)
            raise
    if attention_of(self.config) == NAME:
        if self not in _registered:
            self.register_forward_pre_hook(_take_documents, with_kwargs=True)
            self.register_forward_hook(_forget_documents, always_call=True)
        _registered.update(dict.fromkeys(self.modules(), _contexts[0]))


def shard_batch(
    cp: ContextParallel,
    batch: dict[str, Tensor],
    group: dist.ProcessGroup | None = None,
    place: Callable[[Documents, int], Placement] | None = None,
) -> dict[str, Any]:
    """This rank's part of a batch that all ranks of the context group have.

    Args:
        cp: the context group.
        batch: `input_ids` int64 [b, length]; optional `labels` [b, length], not shifted, -100 for no loss; optional
            `position_ids` [b, length] or [1, length], which start at 0 in each packed document; optional
            `attention_mask` [b, length], 0 for padding, which is on the right and has no labels.
        group: the ranks whose gradients are averaged; default: the context group.
        place: decides the placement of the batch from its documents, for so many context ranks. Every rank must decide
            the same. Default: tokens are where the layout of the strategy says.

    Returns:
        The model's inputs: `input_ids`, `position_ids`, and with labels `labels` and `shift_labels` (both shifted),
            [b, length / n] each, and `num_items_in_batch`, by which the model divides the sum of its losses. With it,
            the mean of the losses and gradients over `group` is the mean over all tokens that have a label. With
            `place` the samples are laid end to end, [1, b * length / n], and `documents` has the placement.

    Raises:
        UsageError: padding before a token or with a label, an unknown tensor in the batch, or a length that cannot be
            sharded over n ranks.
    """
    known = {"input_ids", "labels", "position_ids", "attention_mask"}
    if unknown := batch.keys() - known:
        raise UsageError(f"batch: {min(unknown)} is not supported; give only {', '.join(sorted(known))}")
    tokens, labels = batch["input_ids"], batch.get("labels")
    length = tokens.shape[1]
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    if (mask := batch.get("attention_mask")) is not None and not mask.all():
        positions = _apart(mask.bool(), positions, labels)
    whole = {"input_ids": tokens, "position_ids": positions}
    if labels is not None:
        whole["labels"] = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    cut: dict[str, Any] = {}
    documents = None
    if place:
        whole["position_ids"] = positions.expand_as(tokens)
        documents = Documents((whole["position_ids"] == 0).cumsum(1))
        cut["documents"] = documents = documents.placed(place(documents, cp.n // cp.head_parallel_size))
    cut |= shard_tensors(whole, cp, documents)
    if labels is not None:
        cut["shift_labels"] = cut["labels"] = cut["labels"].contiguous()
        count = (cut["labels"] != IGNORED).sum()
        group = cp.group if group is None else group
        dist.all_reduce(count, group=group)
        cut["num_items_in_batch"] = count / dist.get_world_size(group)
    return cut


def _apart(real: Tensor, positions: Tensor, labels: Tensor | None) -> Tensor:
    """Position ids [b, length] that make each padding token a separate document, which no other token sees."""
    if (real[:, 1:] & ~real[:, :-1]).any():
        raise UsageError("attention_mask: padding before a token; pad on the right (padding_side='right')")
    if labels is not None and (labels[~real] != IGNORED).any():
        raise UsageError(f"labels: padding tokens have labels; give them {IGNORED}")
    return positions.expand_as(real).masked_fill(~real, 0)


def _take_documents(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Checks a batch, and keeps its placed documents for the attention of this call. Models have no such input."""
    if attention_of(model.config) != NAME:  # its attention was changed since
        return None
    if model not in _registered:  # a deep copy, or unpickled: the hooks came along
        raise UsageError(f"{type(model).__name__}: a copy of a model that was registered; call register(cp, model)")
    _check_batch(model, args, kwargs)
    others = dict(kwargs)
    if "documents" in others:
        _placed[_registered[model]] = others.pop("documents")
    return args, others


def _forget_documents(model: PreTrainedModel, *_: object) -> None:
    if model in _registered:
        _placed.pop(_registered[model], None)


def _check_batch(model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
    check_adapters(model)
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise UsageError(f"labels without shift_labels: labels must be shifted before they are sharded; {_USE_HELPER}")
    if kwargs.get("labels") is not None and kwargs.get("num_items_in_batch") is None:
        raise UsageError(f"num_items_in_batch: missing; ranks differ in the number of labels; {_USE_HELPER}")
    if len(args) > 1:
        raise UsageError(f"{len(args)} positional inputs: give each by name; {_USE_HELPER}")
    if kwargs.get("position_ids") is None and _registered[model].n > 1:
        # Default ids of transformers count a rank's own tokens. In chunks they may look like documents.
        raise UsageError(f"position_ids: missing, and transformers' default would be wrong; {_USE_HELPER}")
    _check_shapes(args[0] if args else kwargs.get("input_ids"), kwargs, _registered[model].n)
    for name in ("past_key_values", "cache"):  # renamed in transformers 5.24
        if kwargs.get(name) is not None:
            raise UsageError(f"{name}: caches are not supported under context parallelism; {_USE_HELPER}")
    asked = kwargs.get("output_router_logits")
    if getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked:
        raise UsageError(
            "output_router_logits: the load balancing loss would cover only a rank's tokens; give "
            "output_router_logits=False"
        )
    keep = kwargs.get("logits_to_keep")
    if isinstance(keep, Tensor) or keep:
        raise UsageError("logits_to_keep: it would apply to a rank's own tokens; leave it out")
    if kwargs.get("output_attentions"):
        raise UsageError("output_attentions: attention weights are never stored; leave it out")


def _check_shapes(tokens: Tensor | None, kwargs: dict[str, Any], ranks: int) -> None:
    """Raises UsageError for inputs that do not belong to a rank's tokens int64 [b, s], such as images and audio."""
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return
    shape = tokens.shape[:2]
    for name in ("labels", "shift_labels"):
        labels = kwargs.get(name)
        if labels is not None and labels.shape != shape:
            raise UsageError(f"{name} {list(labels.shape)} for input_ids {list(shape)}: not sharded; {_USE_HELPER}")
    for name, given in kwargs.items() if ranks > 1 else ():
        if name in ("position_ids", "attention_mask"):  # checked elsewhere
            continue
        for x in given if isinstance(given, list | tuple) else [given]:
            if isinstance(x, Tensor) and x.dim() > 1 and x.shape[:2] != shape:
                why = "images and audio are not supported, give text only"
                raise UsageError(f"{name} {list(x.shape)} for input_ids {list(shape)}: not sharded; {why}")


class _OwnMask(UsageError, AttributeError):
    """A model computes with its attention mask. Also an AttributeError, so that `hasattr` is false."""

    def __init__(self, *_: object) -> None:
        super().__init__("attention mask: the model computes with it, and a rank has only a part; use another model")


class _Call:
    """The attention mask of all layers in one call of a model. The first layer computes it.

    Layers that are recomputed in the backward pass reuse it, even if the position ids have changed.

    Attributes:
        mask: the mask with packed documents, from the position ids of all ranks.

    Raises:
        UsageError: it is used as if it were a tensor.
    """

    def _refuse(self, *_: object) -> Any:
        raise _OwnMask

    __getattr__ = __add__ = __radd__ = _refuse

    def __getitem__(self, slices: tuple[slice, ...]) -> "_Call":
        """The mask of all positions, which Gemma 4 asks for; others are refused."""
        return self if all(part in (slice(None), slice(0, None)) for part in slices) else self._refuse()

    def __init__(self, function: MaskFunction) -> None:
        self._function: MaskFunction | None = function
        self.mask = Mask()

    def find(self, cp: ContextParallel, positions: Tensor) -> Mask:
        """The mask. All ranks call it together, with their position ids int64 [b, s]."""
        if self._function is not None:
            documents = _placed.get(cp)
            if documents is None:
                documents = _documents_of(cp, positions)
            elif documents.placement and positions.numel() * cp.n != documents.placement.length:
                why = (
                    f"{positions.numel()} on each of {cp.n} ranks for documents of {documents.placement.length} tokens"
                )
                raise UsageError(f"position_ids: {why}; {_USE_HELPER}")
            self.mask = replace(mask_of(self._function), documents=documents)
            self._function = None
        return self.mask


def _mask(*args: object, mask_function: MaskFunction, attention_mask: Tensor | None = None, **kwargs: object) -> _Call:
    """Replaces transformers' mask, of which a rank has only a part. transformers calls it in each call of a model."""
    if attention_mask is not None and not attention_mask.all():
        raise UsageError("attention_mask: a rank's part is not enough; give the whole mask to shard_batch")
    return _Call(mask_function)


# Keyword arguments that transformers passes to attention and that have no effect on it.
_CHANGES_NOTHING = {
    *("num_items_in_batch", "output_hidden_states", "use_cache", "cache_position", "position_embeddings", "is_causal"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "sliding_window", "shift_labels"),
}


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _Call | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """The attention function for transformers: [b, heads, s, d] of this rank's tokens to [b, s, heads, dv]."""
    name = type(module).__name__
    if (cp := _registered.get(module)) is None:
        raise UsageError(f"{name}: the batches of its model are not checked; call register(cp, model)")
    if dropout:
        raise UsageError(f"attention_dropout {dropout}: context-parallel attention has no dropout; give 0")
    if attention_mask is None:  # accelerate's own context parallelism takes it away
        why = "with accelerate call use_context_parallel, else use another model"
        raise UsageError(f"{name}: has no mask from transformers; {why}")
    if not isinstance(attention_mask, _Call):
        raise UsageError(f"{name}: has its own attention mask instead of one from transformers; use another model")
    for unknown, what in others.items():
        if unknown not in _CHANGES_NOTHING and what is not None and what is not False:
            raise UsageError(f"{name}: passes {unknown} to its attention, which is not supported; use another model")
    if key.shape[2] != query.shape[2]:
        raise UsageError(f"{query.shape[2]} queries, {key.shape[2]} keys: caches are not supported; {_USE_HELPER}")
    if position_ids is None or position_ids.dim() != 2:
        raise UsageError(f"{name}: passes no position_ids [b, s] to its attention; use another model")
    mask = attention_mask.find(cp, position_ids.expand(len(query), -1))
    assert not isinstance(mask.documents, Sequences)
    q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    out = context_parallel_attention(
        q,
        k,
        v,
        cp,
        causal=mask.causal,
        window=mask.window,
        documents=mask.documents,
        scale=scaling,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    assert isinstance(out, Tensor)  # without the log-sum-exp
    return out.transpose(0, 1), None


def _documents_of(cp: ContextParallel, positions: Tensor) -> Documents | None:
    """The packed documents, from the position ids [b, s] of all ranks; None for whole sequences."""
    parts = [torch.empty_like(positions, memory_format=torch.contiguous_format) for _ in range(cp.n)]
    dist.all_gather(parts, positions.contiguous(), group=cp.group)
    by_chunk = dict(zip(cp.chunks, parts, strict=True))
    whole = unshard([by_chunk[chunk] for chunk in range(cp.n)], cp.layout, dim=1)
    before, after = whole[:, :-1], whole[:, 1:]
    ascend = not whole[:, 0].any() and torch.where(after > 0, after == before + 1, True).all()
    if not ascend:
        raise UsageError(f"position_ids: not the positions of this rank's tokens; {_USE_HELPER}")
    starts = whole == 0
    return Documents(starts.cumsum(1).squeeze(0)) if starts.sum() > len(whole) else None
