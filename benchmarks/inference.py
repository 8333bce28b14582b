"""Times inference over a shared cache: the first token (TTFT) by miss rate and variant, and a decode step (TTIT).

Weights and cached keys are random. Run it from the project's folder:

    PYTHONPATH=. python benchmarks/inference.py --ranks 4 --context 1024 --output runs/inference
    PYTHONPATH=. python benchmarks/inference.py --nodes 4 --node-rate 10mbit --output runs/inference
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
from megatron.context_parallel.commands.run import run_main
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.inference.choose import CHOICES
from megatron.context_parallel.tables import show
from tools.netlab import add_flags, cluster_of, exits_as_ranks_did

RANK = Path(__file__).with_name("inference_rank.py")
MISS_RATES = (0.01, 0.025, 0.05, 0.1, 0.2, 1.0)
COLUMNS = ("miss_rate", "new", "cached", "choice", "variant", "milliseconds", "spread", "received")
SIZES = {  # flag: (default, help); one layer of one key/value head, so that links decide
    "context": (4096, "cached and new tokens of a sequence"),
    "batch-size": (1, "sequences"),
    "num-layers": (1, "layers"),
    "hidden-size": (128, "of the model"),
    "num-attention-heads": (16, "query heads"),
    "num-query-groups": (1, "key/value heads"),
    "kv-channels": (64, "size of a head"),
    "rounds": (5, "timed rounds"),
    "warm-up": (1, "passes of each case before"),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    add_flags(parser)
    for name, (default, text) in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text}; default: %(default)s")
    rates = " ".join(map(str, MISS_RATES))
    text = f"new tokens as a share of the context; default: {rates}"
    parser.add_argument("--miss-rates", nargs="+", type=float, default=MISS_RATES, metavar="RATE", help=text)
    default = ["pass-kv", "pass-q", "auto"]
    parser.add_argument("--choices", nargs="+", choices=CHOICES, default=default, help="default: pass-kv pass-q auto")
    parser.add_argument(
        "--cluster", metavar="FILE", help="whose rates decide auto, alg1 and alg5; default: bytes decide"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for CSV, JSON and plot")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Raises UsageError for sizes that cannot be."""
    for name in SIZES:
        value, least = getattr(args, name.replace("-", "_")), 0 if name == "warm-up" else 1
        if value < least:
            raise UsageError(f"--{name} {value}: need at least {least}")
    if args.num_attention_heads % args.num_query_groups:
        raise UsageError(f"--num-query-groups {args.num_query_groups}: must divide --num-attention-heads, as 1 does")
    if wrong := [rate for rate in args.miss_rates if not 0 < rate <= 1]:
        raise UsageError(f"--miss-rates {wrong[0]:g}: give shares above 0, 1 at most, such as 0.05")


def rows_of(entries: list[dict]) -> list[dict]:
    """A row for each entry. A round takes as long as its slowest rank; the median of the rounds counts."""
    rows = []
    for entry in entries:
        times = [max(rank["seconds"] for rank in ranks) for ranks in entry["rounds"]]
        median = statistics.median_low(times)
        received = max(rank["received"] for ranks in entry["rounds"] for rank in ranks)
        measured = {"milliseconds": 1000 * median, "spread": (max(times) - min(times)) / median, "received": received}
        rows.append({name: entry.get(name) for name in COLUMNS} | measured)
    return rows


def table(rows: list[dict], choices: list[str], title: str) -> Table:
    """As Table 4 of the paper, with a line for the decode step below."""
    shown = Table("miss rate", title=title)
    for name in ("P", "T", *(f"{choice} ms" for choice in choices), "auto takes"):
        shown.add_column(name, justify="right")
    cases = {(row["miss_rate"], row["choice"]): row for row in rows}
    for rate in dict.fromkeys(row["miss_rate"] for row in rows if row["miss_rate"]):
        of = [cases[rate, choice] for choice in choices]
        taken = cases[rate, "auto"]["variant"] if "auto" in choices else "-"
        times = [f"{row['milliseconds']:.1f}" for row in of]
        shown.add_row(f"{rate:.2%}", str(of[0]["cached"]), str(of[0]["new"]), *times, taken)
    decode = cases[None, "decode"]
    shown.caption = f"a decode step over {decode['cached']} cached tokens (TTIT): {decode['milliseconds']:.1f} ms"
    return shown


def plot(rows: list[dict], path: Path) -> None:
    """As Figure 9 of the paper: how much faster each choice is than pass-KV, by miss rate."""
    by_choice: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["miss_rate"]:
            by_choice.setdefault(row["choice"], {})[row["miss_rate"]] = row["milliseconds"]
    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    first = next(iter(by_choice))
    for choice, times in by_choice.items():
        axes.plot([*times], [by_choice[first][rate] / ms for rate, ms in times.items()], marker="o", label=choice)
    axes.set(xscale="log", yscale="log", xlabel="miss rate T / (T + P)", ylabel=f"times faster than {first}")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


@exits_as_ranks_did
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    place = cluster_of(args)
    check(args)
    report.make_folder(args.output)
    task = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name in SIZES}
    task |= {"miss_rates": list(args.miss_rates), "choices": args.choices, "cluster": args.cluster}
    surroundings = job.surroundings(place)
    entries = job.results_of(RANK, task, place)
    rows = rows_of(entries)
    with (args.output / "passes.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    run = {"task": task, "surroundings": surroundings, "entries": entries}
    (args.output / "run.json").write_text(json.dumps(run, indent=1) + "\n")
    plot(rows, args.output / "miss_rates.png")
    heads = f"{args.num_attention_heads} heads ({args.num_query_groups} kv) x {args.kv_channels}"
    where = f"{place.ranks} ranks, {args.node_rate or 'unshaped'}; {args.num_layers} layers, {heads}, fp32"
    show(table(rows, args.choices, f"time to the first token (TTFT): {where}"))
    print(f"wrote {args.output}/passes.csv, run.json and miss_rates.png")
    return 0


if __name__ == "__main__":
    run_main(main)
