"""Shows what a strategy does: volume, steps, idle time and peak memory of its plans, and a drawing of them."""

import argparse
from pathlib import Path

from rich.table import Table

from megatron.context_parallel import LAYOUTS, STRATEGIES, UsageError
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.cluster.search.auto import headline
from megatron.context_parallel.cluster.search.candidates import Workload
from megatron.context_parallel.cluster.search.planner import GroupDevices, search
from megatron.context_parallel.cluster.simulate.one_pass import PassForecast, simulate
from megatron.context_parallel.cluster.simulate.timeline import write_timeline
from megatron.context_parallel.plan.ir import Plan, PlanError
from megatron.context_parallel.plan.pictures.draw import draw, file_name
from megatron.context_parallel.plan.pictures.page import write_page
from megatron.context_parallel.plan.verify import PlanReport, verify
from megatron.context_parallel.plan.volume import Shape, received_bytes
from megatron.context_parallel.strategies import AUTO, parse_spec
from megatron.context_parallel.tokens.mask import Mask


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    names = f"one or more of {', '.join(STRATEGIES)}, with options as in usp:head_parallel_size=2 or mesh:grid=2x4; "
    names += f"{AUTO}: the fastest on --cluster"
    parser.add_argument("strategy", nargs="+", metavar="SPEC", help=names)
    parser.add_argument("--ranks", type=int, required=True, help="size of the context group")
    parser.add_argument("--layout", choices=LAYOUTS, help="default: the strategy's own")
    parser.add_argument("--full-mask", action="store_true", help="every token sees every token; default: causal")
    parser.add_argument("--num-attention-heads", type=int, help="default: one per rank")
    parser.add_argument("--num-query-groups", type=int, help="key/value heads; default: one per attention head")
    parser.add_argument("--seq-length", type=int, help="tokens: volume in MiB too, batch 1, 16-bit model")
    parser.add_argument("--kv-channels", type=int, default=128, help="width of a head; default: %(default)s")
    parser.add_argument("--cluster", metavar="NAME", help="predict times on a cluster: a preset, or a .yaml file")
    parser.add_argument(
        "--timeline", type=Path, metavar="FILE", help="write the predicted times of one strategy (.json)"
    )
    parser.add_argument("--draw", type=Path, metavar="FILE", help="write a .png or .svg of each strategy and pass")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an interactive page of all strategies")
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
    if args.cluster and not args.seq_length:
        raise UsageError(f"--cluster {args.cluster}: needs --seq-length, such as 131072")
    if args.timeline and not (args.cluster and len(args.strategy) == 1):
        raise UsageError(f"--timeline {args.timeline}: needs --cluster and one strategy")
    files = ("--timeline", args.timeline, (".json",)), ("--draw", args.draw, (".png", ".svg"))
    for flag, path, kinds in (*files, ("--html", args.html, (".html",))):
        if path and path.suffix not in kinds:
            raise UsageError(f"{flag} {path}: must end in {' or '.join(kinds)}")
        if path and not path.absolute().parent.is_dir():
            raise UsageError(f"{flag} {path}: no folder {path.parent}; make it first")


def shape_of(args: argparse.Namespace) -> Shape | None:
    """Sizes on a rank, where the length of the sequence is given."""
    if not args.seq_length:
        return None
    rows = args.seq_length // args.ranks
    return Shape(rows, args.num_attention_heads, args.num_query_groups, args.kv_channels, itemsize=2)


def row(spec: str, plan: Plan, report: PlanReport, shape: Shape | None, forecast: PassForecast | None) -> list[str]:
    size = max(received_bytes(plan, rank, shape) for rank in range(plan.size)) / 2**20 if shape else 0
    return [
        spec,
        way(plan),
        f"{report.received:g}",
        *([f"{size:.4g}" if size < 1000 else f"{size:.0f}"] if shape else []),
        f"{report.steps}",
        f"{report.idle:.2%}",
        f"{max(report.peak):g}",
        *([f"{forecast.seconds * 1e3:.4g}", f"{forecast.exposed * 1e3:.4g}"] if forecast else []),
    ]


def resolve_auto(args: argparse.Namespace, cluster: Cluster | None) -> list[str]:
    """The strategies given, with the planner's choice in place of "auto"."""
    if AUTO not in args.strategy:
        return args.strategy
    if cluster is None:
        raise UsageError(f"{AUTO}: needs to know the cluster; give --cluster, such as --cluster dgx-h100")
    sizes = args.seq_length, args.num_attention_heads, args.num_query_groups, args.kv_channels
    workload = Workload(*sizes, mask=Mask(not args.full_mask))
    found = search(workload, GroupDevices(cluster), {"layout": args.layout} if args.layout else {})
    print(headline(found))
    return [found.best if spec == AUTO else spec for spec in args.strategy]


def way(plan: Plan) -> str:
    return "backward" if plan.backward else "forward"


def by_tensor(plan: Plan, report: PlanReport) -> str:
    received = []
    for tensor in sorted({t for volume in report.volume for t in volume}):
        most = max(volume[tensor] for volume in report.volume)
        received.append(f"{most:g} {tensor}")
    return f"  {way(plan):8}  {' + '.join(received) or '-'}"


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    check(args)
    mask = "full" if args.full_mask else "causal"
    table = Table(
        title=f"{args.ranks} ranks, {mask} mask, {args.num_attention_heads} heads, {args.num_query_groups} kv heads",
        caption="received, peak (buffers alive): units, of the rank that has most.\n"
        "A unit is a chunk of one tensor of model width.\n"
        "idle: a pair of chunks takes one unit of time, communication none."
        + ("\nms: predicted, and how much of it no block hides." if args.cluster else ""),
    )
    table.add_column("strategy")
    table.add_column("pass")
    shape, pages, volumes, forecasts = shape_of(args), dict[str, list[Plan]](), list[str](), dict[str, PassForecast]()
    cluster = load_cluster(args.cluster).part(args.ranks) if args.cluster else None
    times = ["ms", "exposed"] if cluster else []
    for heading in ("received", *(["MiB"] if shape else []), "steps", "idle", "peak", *times):
        table.add_column(heading, justify="right")
    for spec in resolve_auto(args, cluster):
        choice = parse_spec(spec, layout=args.layout)
        volumes.append(f"{spec}, {choice.layout} layout")
        passes = pages[choice.spec] = []
        heads = {"heads": args.num_attention_heads, "kv_heads": args.num_query_groups}
        for backward in (False, True):
            plan = choice.plan(args.ranks, causal=not args.full_mask, backward=backward, **heads)
            try:
                report = verify(plan, plan.kv_ratio(args.num_attention_heads, args.num_query_groups))
            except PlanError as error:
                raise UsageError(f"{spec}, {way(plan)}: {error}") from None
            forecast = simulate(plan, cluster, shape, Mask(not args.full_mask)) if cluster and shape else None
            if forecast:
                forecasts[way(plan)] = forecast
            table.add_row(*row(spec, plan, report, shape, forecast))
            volumes.append(by_tensor(plan, report))
            passes.append(plan)
            if args.draw:
                path = args.draw.with_stem(f"{args.draw.stem}-{file_name(choice.spec, args.ranks, backward)}")
                draw(plan, path)
                print(f"wrote {path}")
    if args.timeline:
        write_timeline(forecasts, args.timeline)
        print(f"wrote {args.timeline}")
    if args.html:
        write_page(pages, args.html, (args.num_attention_heads, args.num_query_groups), shape)
        print(f"wrote {args.html}")
    show(table)
    print("units received, by tensor:", *volumes, sep="\n")
