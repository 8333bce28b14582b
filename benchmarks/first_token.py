"""The time to the first token by ranks, context and miss rate, on emulated hosts: Figures 6 to 9 of Yang et al. (2024).

Each rank is one of the eight GPUs of a host, with its part of Llama 3 405B and its own NIC. Attention and everything
else in a host take the time that `gtt` describes, in slow motion. Messages between hosts are real. Run it as root:

    PYTHONPATH=. python benchmarks/first_token.py --output runs/first_token
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from benchmarks import job, report
from examples.paper_tables.cells import read_cells
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.step.prefill_time import Prefill, PrefillForecast, prefill_seconds
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.inference.choose import PASS_KV, PASS_Q
from megatron.context_parallel.trainer.arguments.preset_model import preset_model
from tools.netlab import exits_as_ranks_did, with_devices

RANK = Path(__file__).with_name("first_token_rank.py")
CLUSTER, MODEL, INSIDE = "gtt", "llama3-405b", 8  # GPUs of a host, all tensor-parallel
FULL = 128_000  # tokens: the paper's 128K
AUTO, TENSOR = "auto", "tensor parallel"
SYSTEMS = (PASS_KV, PASS_Q, AUTO, TENSOR)
CONTEXTS = (32_000, 64_000, 256_000, 512_000)  # beside FULL, on the most hosts
RATES = (0.01, 0.025, 0.05, 0.1, 0.2)  # of new tokens, on RATE_HOSTS
RATE_HOSTS = 4
FINER = 4  # so many times the tokens stand for a sequence of which few are new
PAPER = {  # seconds of a full prefill of 128K, by hosts and system
    (1, PASS_KV): (42.010, "Table 6"),
    (2, PASS_KV): (21.042, "Table 6"),
    (4, PASS_KV): (11.462, "Table 4, with a cache"),
    (8, PASS_KV): (5.85, "section 4.2.1"),
    (4, PASS_Q): (12.361, "Table 4, with a cache"),
    (2, TENSOR): (1.15 * 21.042, "Figure 7: 15% above CP"),
    (8, TENSOR): (2.0 * 5.85, "Figure 7: 100% above CP"),
}


class Case(NamedTuple):
    """A prefill on `hosts`, of a share of `rate` new tokens in a context."""

    hosts: int
    system: str
    context: int
    rate: float

    @property
    def new(self) -> int:
        return round(self.context * self.rate)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    text = "numbers of emulated hosts; default: %(default)s"
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4, 8], metavar="N", help=text)
    text = "tokens that stand for 128,000; default: %(default)s"
    parser.add_argument("--tokens", type=int, default=1024, help=text)
    parser.add_argument("--slower", type=float, default=40.0, help="times as long as on the GPUs; default: %(default)s")
    parser.add_argument("--layers", type=int, default=1, help="of 126; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds; default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="DIR", required=True, help="folder for the table, JSON and plot")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Raises UsageError for invalid sizes."""
    if wrong := [n for n in args.counts if n not in (1, 2, 4, 8, 16)]:
        raise UsageError(f"--counts {wrong[0]}: must divide the 16 heads of a GPU, as 4 does")
    for name, least in (("tokens", 256), ("slower", 1), ("layers", 1), ("rounds", 1)):
        if getattr(args, name) < least:
            raise UsageError(f"--{name} {getattr(args, name)}: give at least {least}")


def forecast(case: Case, variant: str) -> PrefillForecast:
    """The prediction for the GPUs of the paper. `variant`: what `auto` chose."""
    context, tensor = (1, case.hosts * INSIDE) if case.system == TENSOR else (case.hosts, INSIDE)
    run = TrainConfig(seq_length=case.new, context_parallel_size=context, tensor_model_parallel_size=tensor)
    plan = "ring" if variant == PASS_KV else f"attention2d:grid=1x{case.hosts}"
    prefill = Prefill(case.new, case.context - case.new, choice=plan if context > 1 else "ring")
    return prefill_seconds(preset_model(MODEL, 131_072), run, load_cluster(CLUSTER), prefill)


def emulated(case: Case, tokens: int, slower: float) -> dict:
    """A case of `first_token_rank.measure`, in which `tokens` stand for 128K."""
    parts = forecast(case, PASS_KV)
    model = preset_model(MODEL, 131_072)
    rest, sums = parts.products + parts.other + parts.cache, 0.0
    if case.system == TENSOR:
        sums = forecast(case._replace(hosts=1), PASS_KV).tensor / 2
    else:
        rest += parts.tensor
    context, new = (max(1, round(of * tokens / FULL)) for of in (case.context, case.new))
    return {
        "case": case,
        "parallel": "tensor" if case.system == TENSOR else "context",
        "choice": PASS_KV if case.system == TENSOR else case.system,
        "new": new,
        "cached": context - new,
        "rest": slower * rest / model.num_layers,
        "sums": slower * sums / model.num_layers,
    }


def run_cases(cases: Sequence[Case], tokens: int, slower: float, args: argparse.Namespace) -> dict:
    """The results of cases on equally many hosts."""
    flags = {"devices": CLUSTER, "scale": tokens / (slower * FULL), "stands_for": FULL, "nodes": cases[0].hosts}
    given = argparse.Namespace(**flags, ranks=None, ranks_per_node=None, node_rate=None, nic=None)
    place, described = with_devices(given, tokens)
    task = {"layers": args.layers, "rounds": args.rounds, "cluster": job.write_cluster(described, args.output)}
    task["cases"] = [emulated(case, tokens, slower) for case in cases]
    surroundings = job.surroundings(place)
    entries = job.results_of(RANK, task, place)
    return {"surroundings": surroundings, "tokens": tokens, "slower": slower, "entries": entries}


def measured(runs: Iterable[dict], layers: int) -> dict[Case, dict]:
    """Of each case the seconds of all layers on the GPUs, the spread, the variant, and Python's part of the time."""
    found = {}
    for run in runs:
        for entry in run["entries"]:
            times = [max(report.column(of_ranks, "seconds")) for of_ranks in entry["rounds"]]
            median = statistics.median_low(times)
            found[Case(*entry["case"])] = {
                "seconds": median / run["slower"] * preset_model(MODEL, 131_072).num_layers / layers,
                "spread": (max(times) - min(times)) / median,
                "variant": entry["variant"],
                "python": entry["python"] / median,
            }
    return found


def cases_of(counts: Sequence[int]) -> list[list[Case]]:
    """The full prefills of each number of hosts, with those of other contexts on the most hosts."""
    groups = [[Case(n, system, FULL, 1.0) for system in (SYSTEMS if n > 1 else SYSTEMS[:1])] for n in counts]
    most = max(counts)
    groups[counts.index(most)] += [Case(most, PASS_KV, context, 1.0) for context in CONTEXTS]
    return groups


def lines(found: dict[Case, dict]) -> list[str]:
    """The table of docs/benchmarks/inference.md."""
    shown = [
        "| hosts | | context | new | paper, s | predicted, s | measured, s | spread |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case, of in found.items():
        paper = paper_seconds(case)
        system = f"auto: {of['variant']}" if case.system == AUTO else case.system
        numbers = f"{forecast(case, of['variant']).seconds:.2f} | {of['seconds']:.2f} | {of['spread']:.1%}"
        where = f"{case.hosts} | {system if case.hosts > 1 else 'one host'} | {case.context // 1000}K | {case.rate:.1%}"
        shown.append(f"| {where} | {f'{paper:.2f}' if paper else ''} | {numbers} |")
    return shown


def paper_seconds(case: Case) -> float | None:
    """What the paper prints for a case, if anything."""
    if case.context == FULL and case.rate == 1:
        return PAPER.get((case.hosts, case.system), (None,))[0]
    if case.hosts != RATE_HOSTS or case.context != FULL:
        return None
    row, column = f"P {FULL - case.new} T {case.new}", case.system.replace("kv", "KV").replace("q", "Q")
    same = [cell.value for cell in read_cells("cp_inference", "table_4") if (cell.row, cell.column) == (row, column)]
    return same[0] / 1000 if same and same[0] else None


# -- the plot ---------------------------------------------------------------------------------------------------

COLORS = dict(zip(SYSTEMS, ("#4477aa", "#ee6677", "#228833", "#aa3377"), strict=True))
LOOKS = {"predicted": "--", "measured": "o", "paper": "x"}
Seconds = dict[Case, dict[str, float | None]]  # by kind of number
Points = dict[str, dict[float, float]]  # by kind of number


def kinds_of(found: dict[Case, dict]) -> Seconds:
    """The seconds of each case that are predicted, measured, and in the paper."""
    return {
        case: {
            "predicted": forecast(case, of["variant"]).seconds,
            "measured": of["seconds"],
            "paper": paper_seconds(case),
        }
        for case, of in found.items()
    }


def by_hosts(known: Seconds, system: str) -> Points:
    """The full prefills of FULL tokens. One host computes alike in all systems; the paper has no numbers of `auto`."""
    points: Points = {}
    for kind in LOOKS:
        own = {c.hosts: of[kind] for c, of in known.items() if (c.context, c.rate) == (FULL, 1) and c.system == system}
        one = [of[kind] for case, of in known.items() if case.hosts == 1 and (kind, system) != ("paper", AUTO)]
        points[kind] = {hosts: value for hosts, value in {**dict(zip([1], one, strict=False)), **own}.items() if value}
    return points


def over_one_host(points: Points) -> Points:
    """How many times faster than one host."""
    return {kind: {n: of[1] / value for n, value in of.items()} for kind, of in points.items() if 1 in of}


def by_context(known: Seconds) -> Points:
    """The full prefills on the most hosts."""
    most = max(case.hosts for case in known)
    shown = {c: of for c, of in known.items() if (c.hosts, c.system, c.rate) == (most, PASS_KV, 1)}
    return {kind: {c.context // 1000: of[kind] for c, of in shown.items() if of[kind]} for kind in LOOKS}


def over_pass_q(known: Seconds, system: str) -> Points:
    """The time of a system divided by that of pass-Q, by miss rate in percent."""
    points: Points = {kind: {} for kind in LOOKS}
    for case, own in known.items():
        if case.rate < 1 and case.system == system:
            q = known[case._replace(system=PASS_Q)]
            for kind, of in points.items():
                if own[kind] and q[kind]:
                    of[100 * case.rate] = own[kind] / q[kind]
    return points


def draw(axes: pyplot.Axes, color: str, points: Points, larger: int = 0) -> None:
    for kind, of in points.items():
        if of:
            size = 9 if kind == "paper" else 5 + larger
            axes.plot(*zip(*sorted(of.items()), strict=True), LOOKS[kind], color=color, markersize=size)


def plot(found: dict[Case, dict], path: Path) -> None:
    """Four plots, as the paper's Figures 6 to 9."""
    known = kinds_of(found)
    figure, ((hosts, scaling), (contexts, rates)) = pyplot.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for system in (AUTO, PASS_KV, PASS_Q, TENSOR):  # the points of `auto` are behind those of what it chose
        draw(hosts, COLORS[system], by_hosts(known, system), 4 * (system == AUTO))
    for system in (PASS_KV, TENSOR):
        draw(scaling, COLORS[system], over_one_host(by_hosts(known, system)))
    draw(contexts, COLORS[PASS_KV], by_context(known))
    for system in (AUTO, PASS_KV):
        draw(rates, COLORS[system], over_pass_q(known, system), 4 * (system == AUTO))
    counts = sorted({case.hosts for case in known})
    scaling.plot(counts, counts, ":", color="#bbbbbb")
    decorate(hosts, "hosts", "seconds to the first token", "Figure 6: a prompt of 128K", counts)
    decorate(scaling, "hosts", "times faster than one host", "Figure 7: context and tensor parallel", counts)
    most = max(counts)
    decorate(
        contexts, "context, K", "seconds", f"Figure 8: longer prompts, {most} hosts", [*by_context(known)["measured"]]
    )
    decorate(
        rates, "new tokens, %", "time / that of pass-q", f"Figure 9: 128K, {RATE_HOSTS} hosts", [1, 2.5, 5, 10, 20]
    )
    rates.set_yscale("linear")
    names = [pyplot.Line2D([], [], color=color, lw=4, label=system) for system, color in COLORS.items()]
    names += [pyplot.Line2D([], [], color="black", ls="", marker="o", label="measured (emulated)")]
    names += [pyplot.Line2D([], [], color="black", ls="--", label="predicted")]
    names += [pyplot.Line2D([], [], color="black", ls="", marker="x", ms=9, label="paper")]
    figure.legend(handles=names, ncols=len(names), fontsize=8, loc="outside lower center")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def decorate(axes: pyplot.Axes, x: str, y: str, title: str, ticks: Sequence[float]) -> None:
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y, title=title)
    axes.set_xticks(sorted(ticks), [f"{tick:g}" for tick in sorted(ticks)])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    if title.startswith(("Figure 6", "Figure 7", "Figure 8")):
        marks = [mark for mark in (1, 2, 4, 8, 16, 32, 64) if low <= mark <= high]
        axes.set_yticks(marks, [f"{mark}" for mark in marks])
    axes.grid(alpha=0.3)


@exits_as_ranks_did
def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    check(args)
    report.make_folder(args.output)
    runs = [run_cases(cases, args.tokens, args.slower, args) for cases in cases_of(args.counts)]
    if RATE_HOSTS in args.counts:
        cases = [Case(RATE_HOSTS, system, FULL, rate) for rate in RATES for system in SYSTEMS[:3]]
        runs.append(run_cases(cases, FINER * args.tokens, 2 * args.slower, args))
    (args.output / "run.json").write_text(json.dumps({"layers": args.layers, "runs": runs}, indent=1) + "\n")
    found = measured(runs, args.layers)
    plot(found, args.output / "first_token.png")
    print("\n".join(lines(found)))
    worst = max(of["python"] for of in found.values())
    print(
        f"Python's own time of a pass is at most {worst:.1%} of it; spreads are at most "
        f"{max(of['spread'] for of in found.values()):.1%}"
    )
    print(f"wrote {args.output}/first_token.png and run.json")
    return 0


if __name__ == "__main__":
    run_main(main)
