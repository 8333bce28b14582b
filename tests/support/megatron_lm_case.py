"""Training by Megatron-LM's functions of megatron-core, with our attention or on one rank without."""

from dataclasses import fields
from inspect import signature

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from megatron.context_parallel.integration import megatron_lm
from megatron.context_parallel.integration.transformer_engine import why_not_importable
from tests.support.device import on_device
from tests.support.gpt_case import BATCH, CU_SEQLENS, LENGTH, VOCABULARY, batch, config, hidden

THD = hasattr(utils, "get_thd_batch_on_this_cp_rank")  # until megatron-core 0.17; then one function for all batches
REAL = [0, 5, 6, 15, 20, 29, 30, 42]  # cu_seqlens of documents that begin at CU_SEQLENS, with padding after some


class PlainAttention(torch.nn.Module):
    """PyTorch's attention as core attention, because megatron-core's own does not support multi-latent attention."""

    def __init__(self, softmax_scale: float, **others: object) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query, key, value, *others: object, **named: object) -> torch.Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def latent(strategies: list[str]) -> tuple[TransformerConfig, ModuleSpec]:
    """Multi-latent attention as DeepSeek's: values of another width, rotary embeddings (yarn) of a part of a head."""
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
    others = {"num_query_groups": 4, "rope_type": "yarn", "multi_latent_attention": True, "qk_layernorm": True}
    given = vars(config()) | sizes | others
    names = {field.name for field in fields(MLATransformerConfig)}
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True, qk_layernorm=True)
    if not strategies:
        spec.submodules.self_attention.submodules.core_attention = PlainAttention
    return MLATransformerConfig(**{name: value for name, value in given.items() if name in names}), spec


def documents(kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`cu_seqlens` and `cu_seqlens_padded` of both samples together."""
    whole, real = (on_device(torch.tensor(bounds, dtype=torch.int32)) for bounds in (CU_SEQLENS, REAL))
    return (real, whole) if kind == "padded" else (whole, None)


def padding() -> torch.Tensor:
    """The tokens of no document: bool [b, length]."""
    inside = torch.zeros(BATCH * LENGTH, dtype=torch.bool)
    for start, length in zip(CU_SEQLENS, torch.tensor(REAL).diff(), strict=False):
        inside[start : start + length] = True
    return ~inside.view(BATCH, LENGTH)


def packed_batch(data: dict, kind: str) -> tuple[dict, PackedSeqParams]:
    """A batch with `thd` bounds, laid end to end and cut as pretrain_gpt.py of the installed release does it."""
    bounds, padded = (None if x is None else x[None] for x in documents(kind))
    rows = {name: None if x is None else x.reshape(1, -1) for name, x in data.items()}
    if THD:
        return utils.get_thd_batch_on_this_cp_rank(rows, bounds, padded, on_device(torch.tensor([14])))
    rows |= {"cu_seqlens": bounds, "cu_seqlens_padded": padded, "max_seqlen": on_device(torch.tensor([14]))}
    cut = utils.get_batch_on_this_cp_rank(
        rows, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )
    bounds, padded = (
        None if cut[name] is None else cut[name].squeeze(0) for name in ("cu_seqlens", "cu_seqlens_padded")
    )
    return cut, PackedSeqParams("thd", bounds, bounds, padded, padded, int(cut["max_seqlen"]), int(cut["max_seqlen"]))


def packed_by_bridge(data: dict, kind: str) -> tuple[dict, PackedSeqParams]:
    """As `packed_batch`, as Megatron-Bridge 0.6 does it: it shards positions in the row, then selects by them."""
    bounds, padded = documents(kind)
    rows = {name: None if x is None else x.reshape(1, -1) for name, x in data.items()}
    assert "is_hybrid_cp" in signature(utils.get_batch_on_this_cp_rank).parameters  # it asks for this name
    physical = bounds if padded is None else padded
    places = {"tokens": on_device(torch.arange(rows["tokens"].shape[1]))[None], "cu_seqlens": physical[None]}
    places = utils.get_batch_on_this_cp_rank(
        {**places, "cu_seqlens_padded": None},
        is_hybrid_cp=False,
        cp_group=parallel_state.get_context_parallel_group(),
    )["tokens"][0]
    cut = {name: None if x is None else x.index_select(1, places) for name, x in rows.items()}
    return cut, PackedSeqParams("thd", bounds, bounds, padded, padded, 14, 14)


def train(strategies: list[str], kind: str = "plain", steps: int = 3, bridge: bool = False) -> list[float]:
    """Losses by Megatron-LM's way: its spec, its function that cuts batches, its rotary embedding.

    Args:
        strategies: our attention; none: Megatron's own, on one rank.
        kind: "plain", "latent" for multi-latent attention, "packed" for `thd`, "padded" for `thd` with padding.
        bridge: packed sequences are cut as by Megatron-Bridge.
    """
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, value in megatron_lm.replacements(strategies) if strategies else ():
            patch.setattr(owner, name, value)
        model_parallel_cuda_manual_seed(3)
        settings, spec = config(), get_gpt_layer_local_spec(normalization="RMSNorm")
        if kind == "latent":
            patch.setattr(multi_latent_attention, "HAVE_TE", not why_not_importable())
            settings, spec = latent(strategies)
        model = on_device(GPTModel(settings, spec, VOCABULARY, LENGTH, position_embedding_type="rope"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        data = {**batch(), "attention_mask": None}
        if kind == "padded":
            data["weight"] = data["weight"].masked_fill(padding(), 0)
        data = on_device(data)
        mask = packed = None
        if not strategies and kind != "latent":
            mask = on_device(hidden("documents" if kind in ("packed", "padded") else None))
        elif strategies and kind in ("packed", "padded"):
            data, packed = (packed_by_bridge if bridge else packed_batch)(data, kind)
        elif strategies:
            data = utils.get_batch_on_this_cp_rank(data)
        losses = []
        for _ in range(steps):
            out = model(data["tokens"], data["position_ids"], mask, labels=data["labels"], packed_seq_params=packed)
            loss = (out * data["weight"]).sum()
            loss.backward()
            for tensor in (loss.detach(), *(p.grad for p in model.parameters())):
                dist.all_reduce(tensor)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    parallel_state.destroy_model_parallel()
    return losses
