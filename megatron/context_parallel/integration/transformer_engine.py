"""Our attention with the interface of Transformer Engine's `DotProductAttention`."""

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel.attention.api import context_parallel_attention
from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.strategies.by_layer import COMM_TYPES

from .groups import context_of

_MASKS = {"causal": True, "causal_bottom_right": True, "no_mask": False}
_CHANGES_NOTHING = (
    *("max_seqlen_q", "max_seqlen_kv", "bottom_right_diagonal", "fast_zero_fill"),
    "thd_attention_policy_dispatch",
)
_SAY_NOTHING = {"attn_mask_type": ("causal",), "window_size": (None, (-1, -1), (-1, 0)), "softcap": (0.0,)}
_WITH_FP8_STATE = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")  # the second until 2.8


@cache
def why_not_importable() -> str:
    """Why Transformer Engine cannot be used here; empty if it can."""
    if find_spec("transformer_engine") is None:
        return "it is not installed"
    try:
        import_module("transformer_engine.pytorch")
    except Exception as error:  # its extension links to CUDA's libraries, which can fail in many ways
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ""


def check_importable() -> None:
    """Raises UsageError if Transformer Engine cannot be imported."""
    if why := why_not_importable():
        raise UsageError(f"--transformer-impl transformer_engine: {why}; give --transformer-impl local")


class DotProductAttention(torch.nn.Module):
    """Replaces `transformer_engine.pytorch.DotProductAttention`, also inside `TransformerLayer`.

    `layer.self_attention.core_attention = DotProductAttention(heads, kv_channels, cp_strategy="mesh")`, then
    `layer.set_context_parallel_group(group, ranks, stream)`. Tokens are those of `module.cp.positions(length)`. Shard
    data and rotary embeddings with `module.cp.shard`. Modules with the same group and strategy share communicators.

    Args:
        num_attention_heads, num_gqa_groups, tp_size, softmax_scale: as in Transformer Engine.
        softcap, window_size: as in Transformer Engine. A call may give others only if these are the defaults.
        attn_mask_type: "causal" or "no_mask"; a call may not turn "no_mask" into "causal".
        qkv_format: "sbhd" or "bshd".
        attention_dropout: 0 only.
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: as for `set_context_parallel_group`.
        cp_strategy: `--cp-strategy`; default: the strategy for `cp_comm_type`.
        attention_type, softmax_type, return_max_logit: only the defaults are supported.
        others: accepted, but have no effect.

    Raises:
        UsageError: an argument that would change the result and is not supported.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        *,
        attention_type: str = "self",
        softmax_type: str = "vanilla",
        softmax_scale: float | None = None,
        softcap: float = 0.0,
        layer_number: int | None = None,
        cp_group: dist.ProcessGroup | None = None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
        cp_strategy: str | None = None,
        return_max_logit: bool = False,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        tp_group: dist.ProcessGroup | None = None,
        get_rng_state_tracker: object = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        _refuse_unless(attention_dropout=(attention_dropout, (0,)), attention_type=(attention_type, ("self",)))
        _refuse_unless(softmax_type=(softmax_type, ("vanilla",)), return_max_logit=(return_max_logit, (False, None)))
        self.heads = tuple(heads // tp_size for heads in (num_attention_heads, num_gqa_groups or num_attention_heads))
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        self.scale, self.softcap = softmax_scale, softcap
        self.layer_number, self.name = layer_number, name
        self.strategy = cp_strategy
        self.cp: ContextParallel | None = None
        if cp_group is not None:
            self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)

    def set_context_parallel_group(
        self,
        cp_group: dist.ProcessGroup | None,
        cp_global_ranks: list[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: object = None,
    ) -> None:
        """Creates the context group for sharded sequences. All its ranks call it together.

        Args:
            cp_group: the group.
            cp_global_ranks: its ranks; optional.
            cp_stream: not used.
            cp_comm_type: "p2p", "all_gather" or "a2a" select ring, allgather and ulysses, if the module was created
                without a strategy.
            load_balancing_strategy: only the default; the layout of the strategy balances.

        Raises:
            UsageError: another `cp_comm_type`, or one that conflicts with a strategy; several groups; ranks of another
                group.
        """
        _refuse_unless(load_balancing_strategy=(load_balancing_strategy, (None,)))
        if cp_group is None:
            self.cp = None
            return
        if isinstance(cp_group, list) or (cp_comm_type not in COMM_TYPES):
            why = 'give the whole group and cp_strategy="usp:head_parallel_size=2", or one of'
            raise UsageError(f"cp_comm_type {cp_comm_type}: {why} {', '.join(COMM_TYPES)}")
        if self.strategy and cp_comm_type != "p2p":
            why = f"cannot be combined with cp_strategy {self.strategy}"
            raise UsageError(f"cp_comm_type {cp_comm_type}: {why}; leave it out")
        if cp_global_ranks is not None and cp_global_ranks != dist.get_process_group_ranks(cp_group):
            raise UsageError(f"cp_global_ranks {cp_global_ranks}: not the ranks of cp_group; give these")
        self.cp = context_of(cp_group, self.strategy or COMM_TYPES[cp_comm_type])

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | None = None,
        qkv_format: str | None = None,
        *,
        qkv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        softcap: float | None = None,
        core_attention_bias_type: str = "no_bias",
        num_splits: int | None = 1,
        **others: object,
    ) -> Tensor:
        """[s, b, heads, d] of this rank's tokens to [s, b, heads * d]; with "bshd", b is first in both.

        `qkv_layer` holds all three along `qkv_interleave_dim`, -3 or -2. Transformer Engine 2.19 and newer pass it if
        each head has its own keys, and neither rotary embeddings nor norms change queries and keys.

        Raises:
            UsageError: no context group yet; a mask, format, bias or cache that is not supported; FP8 attention; a
                value that contradicts the constructor's.
        """
        if self.cp is None:
            raise UsageError("DotProductAttention: no context group; call set_context_parallel_group first")
        if _fp8_attention():
            raise UsageError("FP8 attention: not supported, attention runs in 16 or 32 bits; give fp8_dpa=False")
        self._refuse_other_values(attn_mask_type=attn_mask_type, window_size=window_size, softcap=softcap)
        form, mask = qkv_format or self.qkv_format, attn_mask_type or self.attn_mask_type
        _refuse_unless(qkv_format=(form, ("sbhd", "bshd")), attn_mask_type=(mask, tuple(_MASKS)))
        _refuse_unless(core_attention_bias_type=(core_attention_bias_type, ("no_bias",)), num_splits=(num_splits, (1,)))
        given = {"attention_mask": attention_mask, **others}
        _refuse_unless(**{name: (x, (None, False)) for name, x in given.items() if name not in _CHANGES_NOTHING})
        three = _unpacked((query_layer, key_layer, value_layer), qkv_layer, qkv_interleave_dim)
        q, k, v = (x.transpose(0, 1) if form == "bshd" else x for x in three)
        if (q.shape[2], k.shape[2]) != self.heads:
            raise UsageError(f"{q.shape[2]} query and {k.shape[2]} key heads: the module was created for {self.heads}")
        if len(q) != len(k):
            raise UsageError(f"{len(q)} queries, {len(k)} keys: caches are not supported; give as many keys as queries")
        window = window_size or self.window_size or (-1, -1)
        if window == (-1, 0) and not _MASKS[mask]:
            raise UsageError(f"window_size {window} with {mask}: Transformer Engine takes it for none; give (-1, -1)")
        out = context_parallel_attention(
            q,
            k,
            v,
            self.cp,
            causal=_MASKS[mask],
            window=window,
            scale=self.scale,
            softcap=self.softcap if softcap is None else softcap,
        )
        assert isinstance(out, Tensor)  # without the log-sum-exp
        return (out.transpose(0, 1) if form == "bshd" else out).flatten(2)

    def _refuse_other_values(self, **called: object) -> None:
        # Transformer Engine's layers pass their own settings in each call, even defaults. They would replace ours.
        for name, value in called.items():
            own = getattr(self, name)
            if own not in _SAY_NOTHING[name] and value not in (None, own):
                why = f"the module was created with {own}; give both the same, or leave it out of the module"
                raise UsageError(f"{name} {value}: {why}")


def _fp8_attention() -> bool:
    """Whether Transformer Engine's context asks for attention in FP8."""
    module = next((sys.modules[name] for name in _WITH_FP8_STATE if name in sys.modules), None)
    if module is None or not module.FP8GlobalStateManager.is_fp8_enabled():
        return False
    if os.environ.get("NVTE_DPA_FP8_RECIPE"):  # then these count, not the recipe
        return "1" in (os.environ.get("NVTE_DPA_FP8_RECIPE_DPA"), os.environ.get("NVTE_DPA_FP8_RECIPE_MHA"))
    recipe = module.FP8GlobalStateManager.get_fp8_recipe()
    return recipe.fp8_dpa or recipe.fp8_mha


def _unpacked(three: tuple[Tensor | None, ...], packed: Tensor | None, dim: int) -> tuple[Tensor, ...]:
    """Queries, keys and values, from one tensor if that is given."""
    separate = tuple(x for x in three if x is not None)
    if packed is None and len(separate) == 3:
        return separate
    if packed is None or separate or dim not in (-3, -2) or packed.dim() != 5 or packed.shape[dim] != 3:
        shape = None if packed is None else list(packed.shape)
        given = f"qkv_layer {shape}, qkv_interleave_dim {dim}, {len(separate)} separate tensors"
        raise UsageError(f"{given}: give query_layer, key_layer and value_layer, or only 3 of them packed at -3 or -2")
    return packed.unbind(dim)


def _refuse_unless(**arguments: tuple[object, tuple]) -> None:
    """Raise UsageError for the first argument with an unsupported value."""
    for name, (value, works) in arguments.items():
        if isinstance(value, Tensor) or value not in works:
            shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else value
            raise UsageError(f"{name} {shown}: not supported; give {' or '.join(map(str, works))}")
