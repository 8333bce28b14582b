"""Shows the volume, steps, idle time and peak memory of a strategy's plans, and draws them."""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.plan()

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from megatron.context_parallel import LAYOUTS, STRATEGIES, UsageError
from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.flag_checks import check_relations
from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.cli.run_main import announce
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.cluster.fields import what_if
from megatron.context_parallel.errors import raise_all
from megatron.context_parallel.plan.ir import Plan, PlanError
from megatron.context_parallel.plan.verify import PlanReport, verify
from megatron.context_parallel.plan.volume import Shape, received_bytes
from megatron.context_parallel.strategies import AUTO, parse_spec

if TYPE_CHECKING:
    from megatron.context_parallel.cluster.simulate.one_pass import PassForecast

_SPECS = f"""one or more of {", ".join(STRATEGIES)}, with options as in usp:head_parallel_size=2 or mesh:grid=2x4;
{AUTO}: the fastest one on --cluster"""


class PlanFlags(FlagSection):
    strategy: list[str] = flag(_SPECS, option="SPEC", example="ring")
    ranks: int = flag("number of context ranks", example=8)
    layout: str | None = flag("layout of the tokens over the ranks", derived="the strategy's own", choices=LAYOUTS)
    full_mask: bool = flag("let every token see every token, instead of a causal mask", False)
    num_attention_heads: int = flag("number of query heads", derived="one per rank")
    num_query_groups: int = flag("key/value heads", derived="one per query head", divides="num_attention_heads")
    seq_length: int | None = flag(
        "number of tokens; adds the volume in MiB, for batch 1, 16-bit", example=131072, multiple_of="ranks"
    )
    kv_channels: int = flag("width of a head", 128)
    cluster: str | None = flag(
        "predict times on this cluster, a preset or a .yaml file", unit="NAME", example="dgx-h100", needs="seq_length"
    )
    what_if: str | None = flag(
        "predict for a cluster with other values of these fields",
        unit="FIELD=NUMBER,...",
        example="nics.GB_s=100",
        needs="cluster",
    )
    documents: str | None = flag(
        "packed documents: also show their work and keys by layout, and placed by length",
        unit="LENGTHS|FILE",
        example="8192,1024x20,300x50",
        needs="seq_length",
    )
    timeline: Path | None = flag(
        "write a trace of the predicted times of one strategy (.json)", endings=(".json",), needs="cluster"
    )
    draw: Path | None = flag("write a picture of each strategy and pass (.png or .svg)", endings=(".png", ".svg"))
    html: Path | None = flag("write an interactive page of all strategies (.html)", endings=(".html",))


PARSER = FlagParser(
    PlanFlags,
    __doc__,
    "SPEC [SPEC ...] --ranks N [flags]",
    [
        "ring mesh attention2d --ranks 9 --draw plan.png",
        "ring --ranks 8 --seq-length 131072 --documents lognormal:1100,1.5",
        "auto --ranks 16 --seq-length 131072 --cluster dgx-h100 --html plan.html",
    ],
)


def read_flags(argv: list[str] | None = None) -> PlanFlags:
    """The complete flags. Raises UsageError for invalid combinations."""
    args = PARSER.parse(argv)
    if args.timeline and len(args.strategy) > 1:
        raise UsageError(f"--timeline {args.timeline}: needs one strategy; give only SPEC {args.strategy[0]}")
    heads = args.num_attention_heads or args.ranks
    args = replace(args, num_attention_heads=heads, num_query_groups=args.num_query_groups or heads)
    raise_all(check_relations(args))
    return args


def shape_of(args: PlanFlags) -> Shape | None:
    """Sizes on a rank, if the sequence length is given."""
    if not args.seq_length:
        return None
    rows = args.seq_length // args.ranks
    return Shape(rows, args.num_attention_heads, args.num_query_groups, args.kv_channels, itemsize=2)


def row(spec: str, plan: Plan, report: PlanReport, shape: Shape | None, forecast: "PassForecast | None") -> list[str]:
    size = max(received_bytes(plan, rank, shape) for rank in range(plan.all_ranks)) / 2**20 if shape else 0
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


def resolve_auto(args: PlanFlags, cluster: Cluster | None) -> list[str]:
    """The given strategies, with the planner's choice for "auto"."""
    if AUTO not in args.strategy:
        return args.strategy
    if not (cluster and args.seq_length):
        raise UsageError(f"{AUTO}: needs a cluster; give --cluster, such as --cluster dgx-h100")
    from megatron.context_parallel.cluster.search.auto import headline
    from megatron.context_parallel.cluster.search.candidates import Workload
    from megatron.context_parallel.cluster.search.planner import GroupDevices, search
    from megatron.context_parallel.tokens.mask import Mask

    sizes = args.seq_length, args.num_attention_heads, args.num_query_groups, args.kv_channels
    workload = Workload(*sizes, mask=Mask(not args.full_mask))
    announce(f"predicting the strategies for {args.ranks} x {cluster.device.name}")
    found = search(workload, GroupDevices(cluster), {"layout": args.layout} if args.layout else {})
    print(headline(found))
    return [found.best if spec == AUTO else spec for spec in args.strategy]


def show_documents(args: PlanFlags, cluster: Cluster | None) -> Table:
    """The table of `--documents`; writes their picture, if there is to be one."""
    from megatron.context_parallel.commands.plan_documents import documents_table, loads_by_layout, read_documents
    from megatron.context_parallel.tokens.place_documents import Costs

    shape = shape_of(args)
    assert args.documents and args.seq_length and shape
    documents, lengths = read_documents(args.documents, args.seq_length)
    costs = Costs(1.0)
    if cluster:
        from megatron.context_parallel.cluster.step.placement_costs import placement_costs

        costs = placement_costs(shape, cluster)
    loads = loads_by_layout(documents, args.ranks, costs, not args.full_mask)
    if args.draw:
        from megatron.context_parallel.plan.pictures.loads import draw_loads

        path = args.draw.with_stem(f"{args.draw.stem}-documents-{args.ranks}-ranks")
        draw_loads(loads, args.seq_length, path)
        print(f"wrote {path}")
    return documents_table(loads, lengths, args.seq_length, costs, cluster is not None)


def way(plan: Plan) -> str:
    return "backward" if plan.backward else "forward"


def by_tensor(plan: Plan, report: PlanReport) -> str:
    received = []
    for tensor in sorted({t for volume in report.volume for t in volume}):
        most = max(volume[tensor] for volume in report.volume)
        received.append(f"{most:g} {tensor}")
    return f"  {way(plan):8}  {' + '.join(received) or '-'}"


def main(argv: list[str] | None = None) -> None:
    args = read_flags(argv)
    # These take seconds to import. `--help` and mistakes in flags are reported before.
    from megatron.context_parallel.cluster.simulate.one_pass import simulate
    from megatron.context_parallel.cluster.simulate.timeline import write_timeline
    from megatron.context_parallel.plan.pictures.draw import draw, file_name
    from megatron.context_parallel.plan.pictures.page import write_page
    from megatron.context_parallel.tokens.mask import Mask

    mask = "full" if args.full_mask else "causal"
    table = Table(
        title=f"{args.ranks} ranks, {mask} mask, {args.num_attention_heads} heads, {args.num_query_groups} kv heads",
        caption="received, peak (buffers alive): in units, on the rank with the most.\n"
        "A unit is a chunk of one tensor of model width.\n"
        "idle: if a pair of chunks takes one unit of time, and communication takes none."
        + ("\nms: the predicted time, and the part of it that no block hides." if args.cluster else ""),
    )
    table.add_column("strategy")
    table.add_column("pass")
    shape, pages, volumes, forecasts = shape_of(args), dict[str, list[Plan]](), list[str](), dict[str, "PassForecast"]()
    cluster = load_cluster(args.cluster).part(args.ranks) if args.cluster else None
    if cluster and args.what_if:
        cluster = what_if(cluster, args.what_if)
    documents_table = show_documents(args, cluster) if args.documents else None
    times = ["ms", "exposed"] if cluster else []
    for heading in ("received", *(["MiB"] if shape else []), "steps", "idle", "peak", *times):
        table.add_column(heading, justify="right")
    for spec in resolve_auto(args, cluster):
        choice = parse_spec(spec, layout=args.layout)
        volumes.append(f"{spec}, {choice.layout} layout")
        passes = pages[choice.spec] = []
        for backward in (False, True):
            plan = choice.plan(
                args.ranks,
                causal=not args.full_mask,
                backward=backward,
                heads=args.num_attention_heads,
                kv_heads=args.num_query_groups,
            )
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
    if documents_table:
        print()
        show(documents_table)
