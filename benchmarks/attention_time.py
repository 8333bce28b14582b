"""Times forward and backward of one strategy on the ranks of a job: GPUs over NCCL, or processors over gloo.

torchrun starts it, on one node or many. It compares nothing (`attention.py` does) and checks no result:

    PYTHONPATH=. torchrun --standalone --nproc-per-node 8 benchmarks/attention_time.py --strategy ring --dtype bf16 \\
        --num-attention-heads 32 --kv-channels 128 --seq-length 131072 --output runs/ring
"""

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict

import torch
import torch.distributed as dist

from benchmarks.attention import add_workload, problem_of
from benchmarks.cases import DTYPES, Workload
from benchmarks.report import make_folder
from megatron.context_parallel import ContextParallel, context_parallel_attention
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.errors import UsageError

RESULT = "attention_time.json"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--strategy", required=True, metavar="SPEC", help="such as loongtrain:head_parallel_size=4")
    add_workload(parser)
    return parser.parse_args(argv)


def measure(strategy: str, problem: Workload, rounds: int, warm_up: int, device: torch.device) -> dict:
    """Seconds of the slowest rank in the median round; bytes of GPU memory beside the inputs, None on processors."""
    cp = ContextParallel(strategy)
    rows = problem.length // problem.ranks
    heads = (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads)
    shapes = [(rows, problem.batch, of, problem.head_dim) for of in heads]
    *inputs, dout = (torch.randn(shape, dtype=DTYPES[problem.dtype], device=device) for shape in shapes)
    leaves = [x.requires_grad_() for x in inputs]
    found = []
    for _ in range(warm_up + rounds):
        dist.barrier()
        start, forward = _mark(device)
        out = context_parallel_attention(*leaves, cp, causal=problem.causal)
        middle, backward = _mark(device)
        torch.autograd.grad(out, leaves, dout)
        end, last = _mark(device)
        found.append(torch.tensor([end - start, middle - start, end - middle, backward - forward, last - forward]))
    slowest = torch.stack(found[warm_up:]).to(device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    seconds, forward, backward, *peaks = (statistics.median_low(column) for column in slowest.T.tolist())
    memory = dict(
        zip(("forward_bytes", "backward_bytes"), peaks if device.type == "cuda" else (None, None), strict=True)
    )
    return {"seconds": seconds, "forward": forward, "backward": backward} | memory


def _mark(device: torch.device) -> tuple[float, float]:
    """The time when all launched work is done, and the peak of allocated bytes since the last mark."""
    if device.type != "cuda":
        return time.perf_counter(), 0.0
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return time.perf_counter(), float(peak)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if "WORLD_SIZE" not in os.environ:
        raise UsageError(
            "no torchrun: start it with torchrun --standalone --nproc-per-node 8, or one rank for each GPU"
        )
    problem = problem_of(args, int(os.environ["WORLD_SIZE"]))
    make_folder(args.output)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    try:
        times = measure(args.strategy, problem, args.rounds, args.warm_up, device)
        if dist.get_rank() == 0:
            result = {"strategy": args.strategy, "problem": asdict(problem), "device": _name(device)} | times
            (args.output / RESULT).write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result))
    finally:
        dist.destroy_process_group()
    return 0


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "processor, gloo"


if __name__ == "__main__":
    run_main(main)
