"""Packed documents in megatron-core, which passes `packed_seq_params` from the model to each layer."""

from dataclasses import dataclass
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.tokens.documents import Documents


@dataclass
class PackedDocuments(PackedSeqParams):
    """Documents instead of lengths: `model(..., packed_seq_params=PackedDocuments(documents=...))`.

    The format is not `thd`, so that megatron-core does not change tokens [b, length / n] and their rotary embedding.
    The layout shards the whole packed sequence, for any document lengths. Rotary attention depends only on distances.
    """

    qkv_format: str = "sbhd"
    documents: Documents | None = None

    def over(self, samples: int, length: int) -> Documents:
        """The documents of `samples` of `length` tokens, computed once from `cu_seqlens_q` and kept for all layers.

        Raises:
            UsageError: `cu_seqlens_q` does not fit, or differs from `cu_seqlens_kv`.
        """
        if self.documents is None:
            for ours, theirs in (("cu_seqlens_q", "cu_seqlens_kv"), ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")):
                q, kv = getattr(self, ours), getattr(self, theirs)
                if kv is not None and (q is None or q.tolist() != kv.tolist()):
                    raise UsageError(
                        f"packed_seq_params: {theirs} differs from {ours}; give the same, as self-attention needs"
                    )
            self.documents = Documents.packed(self.cu_seqlens_q, length, self.cu_seqlens_q_padded, samples)
        return self.documents


def accept_thd(model: nn.Module) -> None:
    """Makes `model` accept Megatron's `thd` `packed_seq_params`, with tokens [1, length / n] in the layout's order."""
    model.register_forward_pre_hook(_take_over, with_kwargs=True)


def documents_of(given: PackedSeqParams) -> PackedDocuments:
    """Megatron's `thd` bounds of documents, in the form that our attention reads."""
    bounds: dict[str, Any] = {name: value for name, value in vars(given).items() if "cu_seqlens" in name}
    return PackedDocuments(**bounds)


def _take_over(model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    given: PackedSeqParams | None = kwargs.get("packed_seq_params")
    if given is None or isinstance(given, PackedDocuments):
        return args, kwargs
    return args, {**kwargs, "packed_seq_params": documents_of(given)}
