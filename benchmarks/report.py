"""Results of attention.py and training_step.py as a table, CSV, JSON and a plot."""

import csv
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from rich.table import Table

from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.errors import UsageError

PARTS = ("kernel", "wait", "other", "idle")
COLUMNS = (
    "case",
    "round",
    "rank",
    "seconds",
    "kernel",
    "wait",
    "other",
    "late",
    "received",
    "link_received",
    "planned",
)
COLORS = ("#4477aa", "#ee6677", "#ccbb44", "#dddddd")


def column(ranks: list[dict], name: str) -> list:
    """One number of each rank in a round."""
    return [rank[name] for rank in ranks]


def summarize(entry: dict) -> dict | None:
    """The figures of an entry of `publish`; None if it was not timed.

    A round takes as long as its slowest rank. `median` is that of the rounds (of an even number, the lower), and the
    parts are those of that round, averaged over the ranks: they add up to it. `idle`: this rank was done before the
    slowest.
    """
    if not entry["rounds"]:
        return None
    times = [max(column(ranks, "seconds")) for ranks in entry["rounds"]]
    median = statistics.median_low(times)
    chosen = entry["rounds"][times.index(median)]
    parts = {part: statistics.mean(column(chosen, part)) for part in PARTS[:-1]}
    parts["idle"] = median - statistics.mean(column(chosen, "seconds"))
    by_rank = zip(*(column(ranks, "received") for ranks in entry["rounds"]), strict=True)
    received = [max(of_rounds) for of_rounds in by_rank]
    links = [rank["link_received"] for ranks in entry["rounds"] for rank in ranks]
    return {
        "times": times,
        "median": median,
        "spread": (max(times) - min(times)) / median,
        "parts": parts,
        "received": max(received),
        "planned": max(entry["planned"]) if entry["planned"] else None,
        "off_plan": _off_plan(received, entry["planned"]),
        "link_received": None if None in links else max(links),
    }


def _off_plan(received: list[int], planned: list[int] | None) -> float | None:
    """The largest relative difference of a rank's bytes from the plan's."""
    if planned is None:
        return None
    return max((abs(got / plan - 1) if plan else float(got > 0)) for got, plan in zip(received, planned, strict=True))


def speed_up(first: dict, other: dict) -> float:
    """How many times faster `other` is than `first`: the median over rounds, each against the same round."""
    return statistics.median(a / b for a, b in zip(first["times"], other["times"], strict=True))


def title(run: dict) -> str:
    problem, cluster = run["problem"], run["surroundings"]["cluster"]
    heads = f"{problem['heads']} heads ({problem['kv_heads']} kv) x {problem['head_dim']}"
    mask = "causal" if problem["causal"] else "full mask"
    if problem.get("documents"):  # runs of earlier versions have none
        mask += f", {len(problem['documents'])} documents"
    place = f"{cluster['nodes']} nodes x {cluster['ranks_per_node']} ranks, {_rate(cluster)}"
    size = f"sequence {problem['length']}, batch {problem['batch']}, {heads}, {problem['dtype']}, {mask}"
    return f"{run['title']}: {place}; {size}"


def tables(run: dict) -> list[Table]:
    """Time, where it went, and bytes of all cases: three tables, each of which fits into 80 columns."""
    summaries = {entry["case"]: summarize(entry) for entry in run["entries"]}
    first = next((case for case, summary in summaries.items() if summary), None)
    headings = {
        f"{title(run)}\n\ntime": ("seconds", "spread", f"x {first}", "tokens/s", "error"),
        "where the time went, seconds": PARTS,
        "bytes received": ("MB", "plan", "off plan", "link MB"),
    }
    tokens = run["problem"]["length"] * run["problem"]["batch"]
    shown = []
    for i, (heading, names) in enumerate(headings.items()):
        shown.append(Table("case", title=heading))
        for name in names:
            shown[-1].add_column(name, justify="right")
        for entry in run["entries"]:
            summary = summaries[entry["case"]]
            cells = _cells(summary, summaries[first], tokens, entry["error"])[i] if summary else "-" * len(names)
            shown[-1].add_row(entry["case"], *cells)
    shown[-1].caption = "Columns: docs/benchmarks/emulated_cluster.md"
    return shown


def failures(run: dict) -> list[str]:
    """A line for each case that was not timed, with the reason."""
    return [f"{entry['case']}: not timed: {entry['failure']}" for entry in run["entries"] if entry["failure"]]


def _cells(summary: dict, first: dict, tokens: int, error: float) -> list[list[str]]:
    """A case's cells of each table."""

    def megabytes(value: int | None) -> str:
        return "-" if value is None else f"{value / 1e6:.2f}"

    off = summary["off_plan"]
    return [
        [
            f"{summary['median']:.3f}",
            f"{summary['spread']:.0%}",
            f"{speed_up(first, summary):.2f}",
            f"{tokens / summary['median']:.0f}",
            f"{error:.1e}",
        ],
        [f"{summary['parts'][part]:.3f}" for part in PARTS],
        [
            megabytes(summary["received"]),
            megabytes(summary["planned"]),
            "-" if off is None else f"{off:.2%}",
            megabytes(summary["link_received"]),
        ],
    ]


def _rate(cluster: dict) -> str:
    if cluster["nic"] is None:
        return "loopback"
    rate = cluster["rate_bits_per_second"]
    return f"one NIC per {cluster['nic']}, " + (f"{rate / 1e6:g} Mbit/s" if rate else "unshaped")


def make_folder(path: Path) -> None:
    """Creates the output folder before a long run. Raises UsageError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--output {path}: {error.strerror}; give a folder that can be created, such as runs/try"
        ) from None


def publish(run: dict, folder: Path) -> None:
    """Prints the table, and writes `rounds.csv` (a row per case, round and rank), `run.json` (all there is) and
    `times.png` into `folder`.

    `run` has a `title`, the `problem`, `job.surroundings`, and `entries` (see `attention_rank.measure`), each with
    the `planned` bytes per rank or null.
    """
    with (folder / "rounds.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS)
        rows.writeheader()
        for entry in run["entries"]:
            for number, ranks in enumerate(entry["rounds"]):
                for rank, values in enumerate(ranks):
                    planned = entry["planned"][rank] if entry["planned"] else None
                    where = {"case": entry["case"], "round": number, "rank": rank, "planned": planned}
                    rows.writerow(where | values)
    summaries = {entry["case"]: summarize(entry) for entry in run["entries"]}
    (folder / "run.json").write_text(json.dumps(run | {"summaries": summaries}, indent=1) + "\n")
    _plot(summaries, title(run), folder / "times.png")
    show(*tables(run))
    for line in failures(run):
        print(line)
    print(f"wrote {folder}/rounds.csv, run.json and times.png")


def _plot(summaries: dict[str, dict | None], title: str, path: Path) -> None:
    """Stacked bars of the parts, with a line from the fastest to the slowest round."""
    cases = [case for case, summary in summaries.items() if summary]
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.35 * len(cases)), layout="constrained")
    lefts = [0.0] * len(cases)
    for part, color in zip(PARTS, COLORS, strict=True):
        widths = [summaries[case]["parts"][part] for case in cases]
        axes.barh(cases, widths, left=lefts, label=part, color=color)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for case in cases:
        fastest, slowest = min(summaries[case]["times"]), max(summaries[case]["times"])
        axes.plot([fastest, slowest], [case, case], color="black", marker="|")
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    figure.suptitle(title.replace("; ", "\n"), fontsize=9)
    figure.legend(ncols=len(PARTS), fontsize=8, loc="outside lower center")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
