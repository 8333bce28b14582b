"""The number of cached tokens that fit on this machine."""

import os

import psutil
import torch
from rich.filesize import decimal
from rich.table import Table

from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.kernels.names import SCALE_BYTES
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.config.workload import model_of


def bytes_of_a_token(args: Arguments, kv_cache_dtype: str = "auto") -> int:
    """Bytes of the keys and values of one token in all layers, on one tensor-parallel rank."""
    heads = max(1, args.num_query_groups // args.tensor_model_parallel_size)
    packed = kv_cache_dtype != "auto"
    row = args.kv_channels + SCALE_BYTES if packed else args.kv_channels * args.params_dtype.itemsize
    return args.num_layers * 2 * heads * row


def describe(args: Arguments, cache_tokens: int | None, kv_cache_dtype: str = "auto") -> None:
    """Print the memory of weights and cache on a rank, and the number of tokens that would fit."""
    parameters = model_of(args).parameters_on_stage(0, tensor=args.tensor_model_parallel_size)
    weights, token = parameters * args.params_dtype.itemsize, bytes_of_a_token(args, kv_cache_dtype)
    ranks = args.context_parallel_size
    tokens = cache_tokens or args.max_position_embeddings
    memory = _memory_of_a_rank()
    table = Table(
        "of one rank", "", title=f"{ranks} context ranks, tensor-parallel size {args.tensor_model_parallel_size}"
    )
    table.add_row("free memory now", decimal(memory))
    table.add_row("weights", decimal(weights))
    table.add_row(f"cache of {tokens} tokens over {ranks} ranks", decimal(-(-tokens // ranks) * token))
    show(table)
    print(f"tokens that fit: {max(0, (memory - weights) // token * ranks)}; a pass needs some additional memory")


def _memory_of_a_rank() -> int:
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
