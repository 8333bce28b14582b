"""Prints a Markdown table of the errors of strategies on 1 to 64 ranks, all in this process.

PYTHONPATH=. python benchmarks/error_by_ranks.py --dtype bfloat16 --strategies ring ring:partials_in_16_bits=yes
"""

import argparse

import torch

from megatron.context_parallel import AllRanks, context_parallel_attention
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.kernels.reference import attention

WHAT = ("out", "lse", "dq", "dk", "dv")


def gradients(function, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of `function(q, k, v) -> (out, lse)`; the last of `tensors` is the output gradient."""
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out, lse = function(*leaves)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, tensors[3].to(out.dtype))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--strategies", nargs="+", default=["ring", "attention2d", "mesh"], metavar="SPEC")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--num-attention-heads", type=int, default=4)
    parser.add_argument("--num-query-groups", type=int, default=2)
    parser.add_argument("--kv-channels", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    heads, groups = args.num_attention_heads, args.num_query_groups
    shapes = [(args.seq_length, 1, h, args.kv_channels) for h in (heads, groups, groups, heads)]
    tensors = [torch.randn(shape).to(getattr(torch, args.dtype)) for shape in shapes]
    wide, scale = [x.double() for x in tensors], args.kv_channels**-0.5
    exact = gradients(lambda *x: attention(*x, causal=True, scale=scale), wide)
    print(f"| strategy | ranks | {' | '.join(WHAT)} |\n|---|---|{'---|' * len(WHAT)}")
    for name in args.strategies:
        for n in args.ranks:
            cp = AllRanks(n, name)
            got = gradients(lambda *x, cp=cp: context_parallel_attention(*x, cp, return_lse=True), tensors)
            errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, exact, strict=True)]
            print(f"| {name} | {n} | {' | '.join(f'{error:.2e}' for error in errors)} |", flush=True)


if __name__ == "__main__":
    run_main(main)
