"""Shows what a strategy does: volume, steps, idle time and peak memory of its plans, and a drawing of them."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron.context_parallel import LAYOUTS, STRATEGIES, UsageError
from megatron.context_parallel.plan.draw import draw
from megatron.context_parallel.plan.ir import Plan
from megatron.context_parallel.plan.verify import Report, verify
from megatron.context_parallel.plan.volume import Shape, received_bytes
from megatron.context_parallel.strategies import choose


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    names = f"one or more of {', '.join(STRATEGIES)}, with options as in usp:head_parallel_size=2 or mesh:grid=2x4"
    parser.add_argument("strategy", nargs="+", metavar="SPEC", help=names)
    parser.add_argument("--ranks", type=int, required=True, help="size of the context group")
    parser.add_argument("--layout", choices=LAYOUTS, help="default: the strategy's own")
    parser.add_argument("--full-mask", action="store_true", help="every token sees every token; default: causal")
    parser.add_argument("--num-attention-heads", type=int, help="default: one per rank")
    parser.add_argument("--num-query-groups", type=int, help="key/value heads; default: one per attention head")
    parser.add_argument("--seq-length", type=int, help="tokens: volume in MiB too, batch 1, 16-bit model")
    parser.add_argument("--kv-channels", type=int, default=128, help="width of a head; default: %(default)s")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write a .png or .svg of each strategy and pass")
    args = parser.parse_args(argv)
    args.num_attention_heads = args.num_attention_heads or args.ranks
    args.num_query_groups = args.num_query_groups or args.num_attention_heads
    return args


def check(args: argparse.Namespace) -> None:
    """Raises UsageError for what argparse cannot see."""
    if args.ranks < 1:
        raise UsageError(f"--ranks {args.ranks}: need at least 1")
    if args.num_query_groups < 1 or args.num_attention_heads % args.num_query_groups:
        raise UsageError(
            f"--num-query-groups {args.num_query_groups}: must divide --num-attention-heads {args.num_attention_heads}"
        )
    if args.seq_length is not None and (args.seq_length < 1 or args.seq_length % args.ranks):
        raise UsageError(f"--seq-length {args.seq_length}: must be a multiple of --ranks {args.ranks}")
    if args.draw and args.draw.suffix not in (".png", ".svg"):
        raise UsageError(f"--draw {args.draw}: must end in .png or .svg")
    if args.draw and not args.draw.absolute().parent.is_dir():
        raise UsageError(f"--draw {args.draw}: no folder {args.draw.parent}; make it first")


def row(args: argparse.Namespace, plan: Plan, report: Report) -> list[str]:
    tensors = sorted({t for volume in report.volume for t in volume})
    by_tensor = " + ".join(f"{max(v[t] for v in report.volume):g} {t}" for t in tensors)
    size = "-"
    if args.seq_length:
        rows, heads, kv_heads = args.seq_length // plan.size, args.num_attention_heads, args.num_query_groups
        shape = Shape(rows, heads, kv_heads, args.kv_channels, itemsize=2)
        size = f"{max(received_bytes(plan, rank, shape) for rank in range(plan.size)) / 2**20:.4g} MiB"
    return [
        plan.name,
        plan.layout,
        "backward" if plan.backward else "forward",
        size,
        f"{report.received:g}",
        by_tensor or "-",
        f"{report.steps}",
        f"{report.idle:.2%}",
        f"{max(report.peak):g}",
    ]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check(args)
    mask = "full" if args.full_mask else "causal"
    table = Table(
        title=f"{args.ranks} ranks, {mask} mask, {args.num_attention_heads} heads, {args.num_query_groups} kv heads",
        caption="Units: one chunk of one tensor of model width. Volume and peak are those of the rank that has most; "
        "idle: a pair of chunks takes one unit of time, communication none.",
    )
    for heading in ("strategy", "layout", "pass", "bytes", "received", "by tensor", "steps", "idle", "peak buffers"):
        table.add_column(heading)
    for spec in args.strategy:
        choice = choose(spec, layout=args.layout)
        heads = {"heads": args.num_attention_heads, "kv_heads": args.num_query_groups}
        for backward in (False, True):
            plan = choice.plan(args.ranks, causal=not args.full_mask, backward=backward, **heads)
            report = verify(plan, plan.kv_ratio(args.num_attention_heads, args.num_query_groups))
            table.add_row(*row(args, plan, report))
            if args.draw:
                path = args.draw.with_stem(
                    f"{args.draw.stem}-{choice.strategy.name}-{'backward' if backward else 'forward'}"
                )
                draw(plan, path)
                print(f"wrote {path}")
    Console().print(table)
