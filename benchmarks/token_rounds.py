"""Compares the predicted memory of a backward pass in rounds of tokens with a real one.

It writes a table of docs/benchmarks/memory.md:

    PYTHONPATH=. python benchmarks/token_rounds.py

Two ranks of this host compute the attention of `ulysses` in float32. Of the allocator's peak in the second backward
pass, what a rank has beyond the tensors of the forward pass is shown in units of its queries, of the fuller rank. It
takes a minute.
"""

import argparse
import sys
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.job import results_of, run_job
from benchmarks.page import write_table
from megatron.context_parallel import ContextParallel, context_parallel_attention
from megatron.context_parallel.cli.run_main import ignore_warnings_of_libraries, run_main
from megatron.context_parallel.cluster.step.attention_pass import attention_buffers
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from tools.netlab import Loopback

RANKS, TOKENS, HEADS, WIDTH = 2, 1024, 8, 64  # tokens of a rank; width of a head
CASES = [(rounds, kv_heads) for kv_heads in (HEADS, HEADS // 2) for rounds in (1, 2, 4, 8)]
QUERIES = 4 * TOKENS * HEADS * WIDTH  # bytes
PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "memory.md"
HEADINGS = ["key/value heads", "rounds", "predicted", "allocated", "predicted / allocated"]


def strategy(rounds: int) -> str:
    return f"ulysses:layout=cyclic,token_rounds={rounds}"


def allocated(rounds: int, kv_heads: int) -> int:
    """Bytes of the allocator at the peak of a backward pass, above what the forward pass keeps."""
    cp = ContextParallel(strategy(rounds))
    for _ in range(2):
        q, k, v = (torch.randn(TOKENS, 1, heads, WIDTH, requires_grad=True) for heads in (HEADS, kv_heads, kv_heads))
        out = context_parallel_attention(q, k, v, cp=cp, causal=True)
        gradient = torch.ones_like(out)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            out.backward(gradient)
    assert profile.profiler is not None
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return gradient.nbytes + max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def predicted(rounds: int, kv_heads: int) -> int:
    """The same, of the memory report."""
    sizes = {"num_layers": 1, "hidden_size": 1, "ffn_hidden_size": 1, "padded_vocab_size": 1}
    model = ModelShape(num_attention_heads=HEADS, num_query_groups=kv_heads, kv_channels=WIDTH, **sizes)
    how = {"dtype": "fp32", "implementation": "cpu", "context_parallel_size": RANKS}
    return attention_buffers(model, TrainConfig(seq_length=RANKS * TOKENS, cp_strategy=strategy(rounds), **how))


def measure(job: dict) -> list[dict]:
    """The allocator's peak of each rank and case; collective over the world."""
    found = {"allocated": [allocated(*case) for case in CASES]}
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    return everyone


def row(case: tuple[int, int], most: int) -> str:
    expected = predicted(*case)
    units = [f"{size / QUERIES:.1f}" for size in (expected, most)]
    return f"| {' | '.join([str(case[1]), str(case[0]), *units, f'{expected / most:.3f}'])} |"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    ignore_warnings_of_libraries()
    found = results_of(Path(__file__), {}, Loopback(RANKS))
    most = [max(sizes) for sizes in zip(*(rank["allocated"] for rank in found), strict=True)]
    lines = [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    lines += [row(case, size) for case, size in zip(CASES, most, strict=True)]
    print("\n".join(lines))
    write_table(PAGE, "benchmarks/token_rounds.py", lines)


if __name__ == "__main__":
    if len(sys.argv) == 3:  # a rank
        run_job(measure)
    else:
        run_main(main)
