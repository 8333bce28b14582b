"""A small GPT of megatron-core and its batches."""

import torch
import torch.distributed as dist
from megatron.core.transformer import TransformerConfig

from tests.support.device import HEAD_DIM

LENGTH, BATCH, VOCABULARY = 24, 2, 32

CU_SEQLENS = [0, 5, 6, 17, 24, 33, 34, 48]  # of both samples together

WINDOW = (6, 0)


def config(**changes) -> TransformerConfig:
    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": HEAD_DIM,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "normalization": "RMSNorm",
        "init_method_std": 0.2,
        "bias_dropout_fusion": False,
        "transformer_impl": "local",
        "context_parallel_size": dist.get_world_size(),
    }
    return TransformerConfig(**values | changes)


def batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    tokens, labels = (torch.randint(VOCABULARY, (BATCH, LENGTH)) for _ in range(2))
    position_ids = torch.arange(LENGTH).expand(BATCH, -1)
    return {"tokens": tokens, "labels": labels, "position_ids": position_ids, "weight": torch.rand(BATCH, LENGTH)}


def hidden(masked: str | None) -> torch.Tensor:
    """What megatron-core's attention must not see: bool [b, 1, queries, keys]."""
    at = torch.arange(LENGTH)
    hide = (at[None, :] > at[:, None]).expand(BATCH, 1, -1, -1)
    if masked == "window":
        hide = hide | (at[None, :] < at[:, None] - WINDOW[0])
    if masked == "documents":
        ids = torch.bucketize(torch.arange(BATCH * LENGTH), torch.tensor(CU_SEQLENS[1:]), right=True).view(BATCH, -1)
        hide = hide | (ids[:, None, :, None] != ids[:, None, None, :])
    return hide
