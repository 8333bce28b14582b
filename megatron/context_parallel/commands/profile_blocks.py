"""Measures on this machine what `--cp-strategy mesh` schedules by: how many blocks hide the transfer of each tensor.

Run it where you will train, one process per context rank, with the heads of one tensor-parallel rank:

    torchrun --nproc-per-node 8 tools/profile_blocks.py --num-attention-heads 32 --num-query-groups 8 \\
        --kv-channels 128 --chunk-length 4096 --output costs.json

A block is one pair of chunks through the kernel that trains; in a transfer all ranks send to their ring neighbours.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from megatron.context_parallel import STRATEGIES, UsageError
from megatron.context_parallel.communicators import joined
from megatron.context_parallel.kernels import BlockGrad, Scores
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.kernels.masks import CAUSAL, FULL
from megatron.context_parallel.plan.ir import T
from megatron.context_parallel.strategies.mesh import best_grid, circles
from megatron.context_parallel.strategies.mesh_schedule import TRAVELS
from megatron.context_parallel.tables import show
from megatron.context_parallel.transport import TorchTransport, Work

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WARM_UP, RUNS = 2, 7


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--num-attention-heads", type=int, required=True, help="query heads of one rank")
    parser.add_argument("--num-query-groups", type=int, help="key/value heads of one rank; default: as query heads")
    parser.add_argument("--kv-channels", type=int, required=True, help="size of a head")
    parser.add_argument("--chunk-length", type=int, required=True, help="tokens of one rank")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the model; default: %(default)s")
    parser.add_argument("--full-mask", action="store_true", help="every token sees every token; default: causal")
    parser.add_argument("--cp-grid", metavar="AxB", help="query and key/value chunks of a tile; default: least volume")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON file to write")
    args = parser.parse_args(argv)
    args.num_query_groups = args.num_query_groups or args.num_attention_heads
    return args


def check(args: argparse.Namespace, n: int) -> tuple[int, int]:
    """The grid (a, b); raises UsageError for what argparse cannot see."""
    for name in ("num_attention_heads", "num_query_groups", "kv_channels", "chunk_length"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: need at least 1")
    heads, kv_heads = args.num_attention_heads, args.num_query_groups
    if heads % kv_heads:
        raise UsageError(f"--num-query-groups {kv_heads}: must divide --num-attention-heads {heads}, as 1 does")
    if not args.output.absolute().parent.is_dir():
        raise UsageError(f"--output {args.output}: no folder {args.output.parent}; make it first")
    if n < 2:
        raise UsageError(f"{n} process: transfers need at least 2, such as torchrun --nproc-per-node 2")
    if args.cp_grid is None:
        return best_grid(n, kv_heads / heads)
    mesh = STRATEGIES["mesh"]
    grid = mesh.options["grid"].value(args.cp_grid, n)
    mesh.plan(n, grid=grid)  # refuses one that does not fit
    return grid


def tensors(args: argparse.Namespace, device: torch.device) -> dict[T, tuple[Tensor, ...]]:
    """One chunk of everything that travels, folded as in the executor."""
    s, kv_heads, d = args.chunk_length, args.num_query_groups, args.kv_channels
    groups, dtype = args.num_attention_heads // kv_heads, DTYPES[args.dtype]
    q = torch.randn(s, kv_heads, groups, d, device=device).to(dtype)
    k, v = (torch.randn(s, kv_heads, d, device=device).to(dtype) for _ in range(2))
    wide_q, rows = q.float(), q.float().sum(-1)
    return {
        T.Q: (q,),
        T.KV: (k, v),
        T.O: (wide_q, rows),
        T.QDO: (q, torch.randn_like(q), rows, torch.zeros_like(rows)),
        T.DQ: (wide_q,),
        T.DKV: (k.float(), v.float()),
    }


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Median time of `action`, begun by all ranks together, on the slowest rank."""
    times = []
    for _ in range(WARM_UP + RUNS):
        dist.barrier()
        _synchronize(device)
        start = time.perf_counter()
        action()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(statistics.median(times[WARM_UP:]), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(args: argparse.Namespace, grid: tuple[int, int], device: torch.device) -> tuple[dict, dict]:
    """Seconds of a block by pass, and of a transfer by tensor."""
    chunks = tensors(args, device)
    (q, dout, _, delta), (k, v) = chunks[T.QDO], chunks[T.KV]
    kernel = kernel_for(device, q.dtype, q.shape[-1])
    mask, scores = FULL if args.full_mask else CAUSAL, Scores(args.kv_channels**-0.5)
    _, lse = kernel.forward(q, k, v, mask, scores)
    block = BlockGrad(dout, q, k, v, lse, delta, mask)
    blocks = {
        "forward": seconds(lambda: kernel.forward(q, k, v, mask, scores), device),
        "backward": seconds(lambda: kernel.backward(block, scores), device),
    }
    queries, keys = circles(dist.get_rank(), *grid)
    if 1 in grid:  # a group of one rank: nothing of it travels, and its cost is that of the other group's links
        queries = keys = queries if keys.size == 1 else keys
    transport = TorchTransport(joined(None), f"profile of grid {grid}")
    transport.connect([("profile", tuple(range(dist.get_world_size())))])
    transfers = {}
    for tensor, sent in chunks.items():
        circle = keys if tensor in (T.KV, T.DKV) else queries
        sends = [(circle.rank(circle.place - 1), x) for x in sent]
        receives = [(circle.rank(circle.place + 1), torch.empty_like(x)) for x in sent]
        begin = partial(transport.exchange, "profile", sends, receives)
        transfers[tensor] = seconds(partial(_complete, begin), device)
    return blocks, transfers


def _complete(begin: Callable[[], Work]) -> None:
    begin().wait()


def report(args: argparse.Namespace, grid: tuple[int, int], device: torch.device) -> None:
    blocks, transfers = measure(args, grid, device)
    costs = {way: {t: transfers[t] / blocks[way] for t in travels} for way, travels in TRAVELS.items()}
    if dist.get_rank():
        return
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    setup = {k: v for k, v in vars(args).items() if k not in ("output", "cp_grid")}
    setup |= {"ranks": dist.get_world_size(), "cp_grid": f"{grid[0]}x{grid[1]}", "backend": dist.get_backend()}
    setup |= {"device": name, "torch": torch.__version__}
    content = {"costs": costs, "block_seconds": blocks, "transfer_seconds": transfers, "setup": setup}
    args.output.write_text(json.dumps(content, indent=2) + "\n")
    table = Table(title=f"{setup['ranks']} ranks, {name}, grid {setup['cp_grid']}, {setup['backend']}")
    for heading in ("pass", "block", "tensor", "transfer", "cost in blocks"):
        table.add_column(heading, justify="right")
    for way, travels in TRAVELS.items():
        for t in travels:
            times = (f"{1000 * x:.3f} ms" for x in (blocks[way], transfers[t]))
            table.add_row(way, next(times), t, next(times), f"{costs[way][t]:.3g}")
    show(table)
    print(f"wrote {args.output}")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    grid = check(args, int(os.environ.get("WORLD_SIZE", "1")))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        report(args, grid, device)
    finally:
        dist.destroy_process_group()
