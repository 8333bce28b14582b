"""Batches of Megatron's scripts: sharded by the layout, with packed sequences (thd) as documents."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from inspect import signature
from typing import Any, NoReturn
from weakref import WeakSet

import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.errors import UsageError

from .megatron_model import check_layers
from .packed import PackedDocuments, documents_of
from .spec import IN_ZIGZAG, unlike_megatron

_BOUNDS = ("cu_seqlens", "cu_seqlens_padded")
_NOT_SHARDED = {*_BOUNDS, "max_seqlen", "local_cp_size", "hybrid_cp_group"}  # of a batch; not one number for each token


@dataclass
class Batches:
    """Shards each batch, and gives the model the documents of the last one.

    Attributes:
        context: returns the context group; the process groups exist only when the first batch is sharded.
        packed: each call of the model must bring packed sequences, because flags ask for them.
        bounds: `cu_seqlens` and `cu_seqlens_padded` of the last batch.
        checked: the models whose layers were checked.
    """

    context: Callable[[], ContextParallel]
    packed: bool
    bounds: tuple[Tensor, ...] = ()
    checked: WeakSet[GPTModel] = field(default_factory=WeakSet)

    def shard(
        self,
        batch: dict[str, Any],
        is_hybrid_cp: bool | dist.ProcessGroup | None = None,
        cp_group: dist.ProcessGroup | None = None,
        **others: object,
    ) -> dict[str, Any]:
        """This rank's tokens of a batch of tensors [b, length, ...]; bounds of documents [1, m] remain whole.

        Before 0.17 the group comes first. Megatron-Bridge 0.6 looks for the name `is_hybrid_cp`, and shards positions
        in packed sequences, by which it then selects tokens.

        Raises:
            UsageError: a hybrid batch, an attention mask, another group, or bounds that do not fit the batch.
        """
        cp = self.context()
        group = is_hybrid_cp if isinstance(is_hybrid_cp, dist.ProcessGroup) else cp_group
        if is_hybrid_cp is True:
            refuse_hybrid()
        if batch.get("attention_mask") is not None:
            raise UsageError("attention_mask in the batch: give --no-create-attention-mask-in-dataloader")
        if group is not None and group.size() != cp.n:
            raise UsageError(f"cp_group of {group.size()} ranks: batches are sharded over the context group of {cp.n}")
        for name, x in batch.items():
            if "cu_seqlens" in name and name not in _BOUNDS and x is not None:
                raise UsageError(f"{name} in the batch: unknown bounds of packed sequences; give cu_seqlens")
        bounds = tuple(batch[name] for name in _BOUNDS if batch.get(name) is not None)
        if bounds:
            _check_bounds(bounds[-1], batch)
        self.bounds = bounds
        return {name: x if x is None or name in _NOT_SHARDED else cp.shard(x, dim=1) for name, x in batch.items()}

    def shard_packed(
        self,
        batch: dict[str, Any],
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None,
        max_seqlen: Tensor,
        cp_size: int | None = None,
        cp_rank: int | None = None,
    ) -> tuple[dict[str, Any], PackedSeqParams]:
        """As `shard`, with the bounds beside the batch, as until megatron-core 0.17. Returns the bounds as `thd`."""
        bounds = {"cu_seqlens": cu_seqlens, "cu_seqlens_padded": cu_seqlens_padded}
        whole = self.shard(batch | bounds)
        of_q, padded = (None if x is None else x.flatten() for x in bounds.values())
        params = PackedSeqParams("thd", of_q, of_q, padded, padded, int(max_seqlen.max()), int(max_seqlen.max()))
        return {name: whole[name] for name in batch}, params

    def call(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`GPTModel.forward` with the documents of its packed sequences.

        It raises UsageError for packed sequences that `shard` did not shard, for none where flags ask for them, for
        multi-latent attention with them, for embeddings in another layout, and for models that `check_layers` refuses.
        """

        inputs = signature(forward)

        @wraps(forward)
        def forward_documents(
            model: GPTModel, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any
        ) -> Tensor:
            if model not in self.checked:
                check_layers(model, self.context().n)
                self.checked.add(model)
            if inputs.bind(model, *args, **kwargs).arguments.get("decoder_input") is not None:
                self._check_embeddings()
            if packed_seq_params is None and self.packed:
                raise UsageError(
                    "packed sequences (thd): this pipeline stage got none; give --pipeline-model-parallel-size 2 or "
                    "less, or take megatron-core 0.17 or later"
                )
            if packed_seq_params is not None and not isinstance(packed_seq_params, PackedDocuments):
                packed_seq_params = self._documents(model, packed_seq_params)
            return forward(model, *args, packed_seq_params=packed_seq_params, **kwargs)

        return forward_documents

    def _check_embeddings(self) -> None:
        """Raises UsageError for embeddings that a model of images or audio sharded, unless the layout is Megatron's."""
        cp = self.context()
        if unlike_megatron(cp):
            raise UsageError(f"decoder_input, layout {cp.layout}: a model of images or audio {IN_ZIGZAG}")

    def _documents(self, model: GPTModel, given: PackedSeqParams) -> PackedDocuments:
        """The documents of a `thd` batch. RoPE counts positions over the whole batch, not from each document's start.

        Rotary attention depends only on distances, so it is the same.
        """
        if model.config.multi_latent_attention:
            raise UsageError("packed sequences (thd): not supported with --multi-latent-attention; leave it out")
        of_q = given.cu_seqlens_q
        bounds = of_q if given.cu_seqlens_q_padded is None else given.cu_seqlens_q_padded
        # A middle stage gets bounds only. Those of other stages are views of those in the batch.
        has_batch = model.pre_process or model.post_process
        if has_batch and bounds.data_ptr() not in {x.data_ptr() for x in self.bounds}:
            raise UsageError(
                "packed sequences (thd): this batch was not sharded by the layout; shard it with megatron-core's "
                "get_batch_on_this_cp_rank"
            )
        documents = documents_of(given)
        documents.max_seqlen_q = documents.max_seqlen_kv = int(bounds[-1])
        return documents


def refuse_hybrid(*args: object, **kwargs: object) -> NoReturn:
    """Replaces functions that shard hybrid batches."""
    raise UsageError("hybrid context parallelism: not supported in Megatron-LM; use this project's trainer")


def _check_bounds(bounds: Tensor, batch: dict[str, Any]) -> None:
    """Raises UsageError unless the documents fill the batch, which has one row."""
    ends = bounds.flatten().tolist()
    for name in ("tokens", "labels"):
        x = batch.get(name)
        if x is not None and list(x.shape) != [1, ends[-1]]:
            raise UsageError(
                f"cu_seqlens: end at {ends[-1]} for {name} {list(x.shape)}; packed sequences must fill one row: give "
                "--micro-batch-size 1"
            )
