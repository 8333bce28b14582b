"""Times inference over a shared cache: the first token (TTFT) by miss rate and variant, and a decode step (TTIT).

Weights and cached keys are random. Run it from the project's folder:

    PYTHONPATH=. python benchmarks/inference.py --counts 1 2 4 --context 1024 2048 --output runs/inference
    PYTHONPATH=. python benchmarks/inference.py --nodes 4 --node-rate 10mbit --output runs/inference
    PYTHONPATH=. python benchmarks/inference.py --decode-speed
"""

import argparse
import csv
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rich.table import Table

from benchmarks import job, report
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.inference.choose import CHOICES, LayerShape, sent_bytes
from tools.netlab import add_flags, cluster_of, exits_as_ranks_did

RANK = Path(__file__).with_name("inference_rank.py")
MISS_RATES = (0.01, 0.025, 0.05, 0.1, 0.2, 1.0)
COLUMNS = (
    *("ranks", "context", "batch", "miss_rate", "new", "cached", "choice", "variant"),
    *("milliseconds", "spread", "received", "formula", "nic_over_formula"),
)
SIZES = {  # flag: (default, help); one layer of one key/value head, so that links decide
    "num-layers": (1, "layers"),
    "hidden-size": (128, "of the model"),
    "num-attention-heads": (16, "query heads"),
    "num-query-groups": (1, "key/value heads"),
    "kv-channels": (64, "size of a head"),
    "rounds": (5, "timed rounds"),
    "warm-up": (1, "passes of each case before"),
}
LISTS = {  # flag: (default, help); a case of each with each
    "context": ([4096], "cached and new tokens of a sequence"),
    "batch-size": ([1], "sequences"),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    add_flags(parser)
    parser.add_argument(
        "--counts", nargs="+", type=int, metavar="N", help="numbers of ranks on loopback, or of nodes with --node-rate"
    )
    for name, (several, text) in LISTS.items():
        default = " ".join(map(str, several))
        parser.add_argument(f"--{name}", nargs="+", type=int, default=several, help=f"{text}; default: {default}")
    for name, (default, text) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; default: %(default)s")
    rates = " ".join(map(str, MISS_RATES))
    text = f"new tokens as a share of the context; default: {rates}"
    parser.add_argument("--miss-rates", nargs="+", type=float, default=MISS_RATES, metavar="RATE", help=text)
    default = ["pass-kv", "pass-q", "auto"]
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=default, help="default: pass-kv pass-q auto")
    parser.add_argument(
        "--cluster", metavar="FILE", help="cluster whose rates auto, alg1 and alg5 use; default: compare bytes"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for CSV, JSON and plots; required")
    parser.add_argument(
        "--decode-speed",
        action="store_true",
        help="only compare tokens per second on one rank with transformers, for --num-layers and --hidden-size",
    )
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Raises UsageError for invalid sizes."""
    for name in SIZES:
        value, least = getattr(args, name.replace("-", "_")), 0 if name == "warm-up" else 1
        if value < least:
            raise UsageError(f"--{name} {value}: need at least {least}")
    for name in ("counts", *LISTS):
        if wrong := [value for value in getattr(args, name.replace("-", "_")) or () if value < 1]:
            raise UsageError(f"--{name} {wrong[0]}: need at least 1")
    if args.output is None and not args.decode_speed:
        raise UsageError("--output: missing; give a folder, such as --output runs/inference")
    if args.counts and (args.ranks or args.nodes):
        raise UsageError("--counts: cannot be combined with --ranks or --nodes; give only --counts")
    if args.num_attention_heads % args.num_query_groups:
        raise UsageError(f"--num-query-groups {args.num_query_groups}: must divide --num-attention-heads, as 1 does")
    if wrong := [rate for rate in args.miss_rates if not 0 < rate <= 1]:
        raise UsageError(f"--miss-rates {wrong[0]:g}: give fractions above 0, at most 1, such as 0.05")


def rows_of(entries: list[dict], ranks: int, layers: int, sizes: LayerShape) -> list[dict]:
    """A row for each entry. A round takes as long as its slowest rank; the median of the rounds counts.

    `received` are the most bytes of a rank's connections, `formula` those of docs/inference.md for all ranks together.
    The NIC's are compared where each rank has one.
    """
    rows = []
    for entry in entries:
        times = [max(report.column(of_ranks, "seconds")) for of_ranks in entry["rounds"]]
        median = statistics.median_low(times)
        received = max(rank["received"] for of_ranks in entry["rounds"] for rank in of_ranks)
        tokens = [entry["batch"] * entry[name] for name in ("new", "cached")]
        variant = "pass-kv" if entry["variant"] == "pass-kv" else "pass-q"  # decode sends what pass-Q does
        formula = round(layers * ranks * sent_bytes(variant, *tokens, ranks, sizes))
        nic = [sum(filter(None, report.column(of_ranks, "link_received"))) for of_ranks in entry["rounds"]]
        over = statistics.median(nic) / formula - 1 if formula and min(nic) else None
        measured = {"milliseconds": 1000 * median, "spread": (max(times) - min(times)) / median, "received": received}
        measured |= {"ranks": ranks, "formula": formula, "nic_over_formula": over}
        rows.append({name: entry.get(name) for name in COLUMNS} | measured)
    return rows


def table(rows: list[dict], choices: list[str], title: str) -> Table:
    """As Table 4 of the paper, with a line for the decode step of each number of ranks, context and batch size."""
    shown = Table("ranks", title=title)
    for name in ("context", "batch", "miss rate", "P", "T", *(f"{choice} ms" for choice in choices), "auto takes"):
        shown.add_column(name, justify="right")
    cases = {(row["ranks"], row["context"], row["batch"], row["miss_rate"], row["choice"]): row for row in rows}
    for *where, rate in dict.fromkeys(key[:4] for key in cases):
        head = [*map(str, where), "decode" if rate is None else f"{rate:.2%}"]
        of = [cases[*where, rate, choice] for choice in (choices if rate else ["decode"])]
        times = [f"{row['milliseconds']:.1f}" for row in of] + [""] * (len(choices) - len(of))
        taken = cases[*where, rate, "auto"]["variant"] if rate and "auto" in choices else ""
        shown.add_row(*head, str(of[0]["cached"]), str(of[0]["new"]), *times, taken)
    return shown


def nic_lines(rows: list[dict]) -> list[str]:
    """The maximum deviation of the bytes on the NICs from the formula, by variant."""
    over: dict[str, list[float]] = {}
    for row in rows:
        if row["nic_over_formula"] is not None:
            over.setdefault(row["variant"], []).append(row["nic_over_formula"])
    return [
        f"bytes on the NICs, {variant}: {min(found):+.2%} to {max(found):+.2%} of the formula"
        for variant, found in over.items()
    ]


def plot(rows: list[dict], path: Path) -> None:
    """As Figure 9 of the paper: how much faster each choice is than the first, by miss rate."""
    times = {(row["ranks"], row["context"], row["batch"], row["choice"], row["miss_rate"]): row for row in rows}
    last = max(key[:3] for key in times)
    shown = {key[3:]: row["milliseconds"] for key, row in times.items() if key[:3] == last and key[4]}
    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    choices, rates = (list(dict.fromkeys(of)) for of in zip(*shown, strict=True))
    for choice in choices:
        axes.plot(rates, [shown[choices[0], r] / shown[choice, r] for r in rates], marker="o", label=choice)
    axes.set(xscale="log", yscale="log", xlabel="miss rate T / (T + P)", ylabel=f"times faster than {choices[0]}")
    axes.set_title("{} ranks, context {}, batch {}".format(*last))
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def plot_lengths(rows: list[dict], path: Path) -> None:
    """As Figure 6 of the paper: the time of a prompt's first token by context, and of a decode step."""
    figure, both = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    highest = max(row["miss_rate"] or 0 for row in rows)
    for axes, rate, title in zip(both, (highest, None), (f"TTFT, {highest:.0%} new", "TTIT"), strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            if row["miss_rate"] == rate:
                name = "{choice}, {ranks} ranks, batch {batch}".format(**row)
                lines.setdefault(name, []).append((row["context"], row["milliseconds"]))
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        axes.set(xscale="log", yscale="log", xlabel="context", ylabel="ms", title=title)
        axes.legend(fontsize=6)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@exits_as_ranks_did
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check(args)
    if args.decode_speed:
        from benchmarks import decode_speed

        return decode_speed.run(args.hidden_size, args.num_layers, args.rounds)
    name = "nodes" if args.node_rate else "ranks"
    places = [cluster_of(argparse.Namespace(**vars(args) | {name: n})) for n in args.counts or [getattr(args, name)]]
    report.make_folder(args.output)
    task = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in (*SIZES, *LISTS)}
    task |= {"miss_rates": list(args.miss_rates), "choices": args.choices, "cluster": args.cluster}
    sizes = LayerShape(args.num_attention_heads, args.num_query_groups, args.kv_channels, args.kv_channels, 4)
    rows, runs = [], []
    for place in places:
        surroundings = job.surroundings(place)
        entries = job.results_of(RANK, task, place)
        rows += rows_of(entries, place.ranks, args.num_layers, sizes)
        runs.append({"surroundings": surroundings, "entries": entries})
    with (args.output / "passes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    (args.output / "run.json").write_text(json.dumps({"task": task, "runs": runs}, indent=1) + "\n")
    plot(rows, args.output / "miss_rates.png")
    plot_lengths(rows, args.output / "contexts.png")
    heads = f"{args.num_attention_heads} heads ({args.num_query_groups} kv) x {args.kv_channels}"
    where = f"{args.node_rate or 'loopback'}; {args.num_layers} layers, {heads}, fp32"
    show(table(rows, args.choices, f"time to the first token (TTFT), and of a decode step (TTIT): {where}"))
    print("\n".join([*nic_lines(rows), f"wrote {args.output}/passes.csv, run.json, miss_rates.png and contexts.png"]))
    return 0


if __name__ == "__main__":
    run_main(main)
