"""Measures all strategies and peers on emulated H100s, and writes the tables of docs/benchmarks/devices.md.

    sudo -E env PYTHONPATH=. python benchmarks/device_table.py --output runs/devices

It takes about 27 minutes on 2 cores that do nothing else. A run that is in the folder already is not repeated, so it
can be interrupted. With --against it also compares the times with those of an earlier folder.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks import attention, predicted
from benchmarks.cases import Workload
from benchmarks.page import write_table
from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.cluster.description import load_cluster

DOCS = Path(__file__).parents[1] / "docs"
SCRIPT = "benchmarks/device_table.py"
PROBLEM = "--seq-length 1024 --num-attention-heads 16 --kv-channels 32"
DEVICES = "--devices benchmarks/h100.yaml --scale 6.25e-5 --stands-for 262144"
CLUSTERS = {"16 x 1": "--nodes 16", "4 x 4": "--nodes 4 --ranks-per-node 4"}
KV_HEADS = {"MHA": 16, "GQA": 4}
DTYPES = {"float32": "fp32", "bf16": "bf16"}
STRATEGIES = "ring allgather attention2d mesh lightseq ulysses"
STRATEGIES += " loongtrain:head_parallel_size=4 usp:head_parallel_size=4"
BALANCED, UNBALANCED = "lightseq", "lightseq:balance=no"
UNEVEN = f"ring:layout=contiguous {UNBALANCED}"  # ranks wait for each other; one setting of a cluster shows it
PEERS = {
    "MHA": "peer:torch peer:ring-flash-attn peer:yunchang peer:deepspeed",
    "GQA": "peer:ring-flash-attn peer:yunchang",
}
APART = 0.03  # cases that differ by less may be in any order


@dataclass(frozen=True)
class Setting:
    """One run of attention.py."""

    cluster: str
    heads: str
    dtype: str

    @property
    def folder(self) -> str:
        return f"{self.cluster.replace(' ', '')}-{self.heads.lower()}-{self.dtype}"

    def flags(self, rounds: int, output: Path) -> list[str]:
        flags = f"{CLUSTERS[self.cluster]} {DEVICES} {PROBLEM} --num-query-groups {KV_HEADS[self.heads]} "
        flags += f"--dtype {DTYPES[self.dtype]} --rounds {rounds} --strategies {STRATEGIES} {PEERS[self.heads]}"
        if (self.heads, self.dtype) == ("MHA", "bf16"):
            flags += f" {UNEVEN}"
        return [*flags.split(), "--output", str(output / self.folder)]


@dataclass(frozen=True)
class Result:
    """What one run measured, and what is predicted for its strategies, in seconds, by case."""

    measured: dict[str, dict]  # summaries of `report.summarize`
    failures: dict[str, str]
    predicted: dict[str, float]

    @classmethod
    def of(cls, folder: Path) -> "Result":
        run = json.loads((folder / "run.json").read_text())
        measured = {case: summary for case, summary in run["summaries"].items() if summary}
        failures = {entry["case"]: entry["failure"] for entry in run["entries"] if entry["failure"]}
        problem, cluster = Workload(**run["problem"]), load_cluster(str(folder / "cluster.yaml"))
        ours = [case for case in measured if not case.startswith("peer:")]
        return cls(measured, failures, {case: predicted.seconds(case, problem, cluster) for case in ours})

    def error(self, case: str) -> float:
        return self.predicted[case] / self.measured[case]["median"] - 1


def settings() -> list[Setting]:
    return [Setting(*names) for names in product(CLUSTERS, KV_HEADS, DTYPES)]


def tables(results: dict[Setting, Result]) -> str:
    """The Markdown of all tables, and what they show in numbers."""
    parts = []
    for cluster in CLUSTERS:
        parts.append(f"### {cluster}: seconds, and speed-up over ring\n\n{times(results, cluster)}")
        agreement = _table(results, cluster, _agreement)
        parts.append(f"### {cluster}: spread, and error of the prediction\n\n{agreement}")
    parts.append(f"### Beside the papers\n\n{_beside_papers(results)}")
    parts.append(f"### In numbers\n\n{_summary(results)}")
    return "\n".join([*parts, _untimed(results)])


def times(results: dict[Setting, Result], cluster: str) -> str:
    """The Markdown of a table of seconds and speed-ups on one cluster."""
    return _table(results, cluster, _time)


def _table(results: dict[Setting, Result], cluster: str, cell: Callable[[Result, str], str]) -> str:
    results = {setting: result for setting, result in results.items() if setting.cluster == cluster}
    names = [f"{setting.heads}, {setting.dtype}" for setting in results]
    lines = [f"| case | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    cases = dict.fromkeys(case for result in results.values() for case in result.measured)
    for case in cases:
        cells = [cell(result, case) if case in result.measured else "" for result in results.values()]
        lines.append(f"| `{case}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _time(result: Result, case: str) -> str:
    seconds = result.measured[case]["median"]
    ring = result.measured.get("ring")  # absent if it was refused
    return f"{seconds:.3f}, {ring['median'] / seconds:.2f}x" if ring else f"{seconds:.3f}"


def _agreement(result: Result, case: str) -> str:
    spread = f"{result.measured[case]['spread']:.1%}"
    return f"{spread}, {result.error(case):+.1%}" if case in result.predicted else spread


def _beside_papers(results: dict[Setting, Result]) -> str:
    """Where a paper's ratio does not depend on its testbed."""
    lines = ["| ratio | paper | measured here |", "|---|---|---|"]
    measured = []
    for setting, result in results.items():
        if UNBALANCED in result.measured:
            ratio = result.measured[UNBALANCED]["median"] / result.measured[BALANCED]["median"]
            measured.append(f"{ratio:.2f} ({setting.cluster})")
    lines.append(f"| `{UNBALANCED}` / `{BALANCED}` | 7.5 / 4.5 = 1.67 | {', '.join(measured)} |")
    return "\n".join(lines) + "\n"


def _summary(results: dict[Setting, Result]) -> str:
    spreads = [summary["spread"] for result in results.values() for summary in result.measured.values()]
    errors = [abs(result.error(case)) for result in results.values() for case in result.predicted]
    wrong = []
    for setting, result in results.items():
        ours = {case: result.measured[case] for case in result.predicted}
        wrong += [f"{setting.folder}: {line}" for line in predicted.wrong_order(result.predicted, ours, APART)]
    lines = [
        f"Spread: median {statistics.median(spreads):.1%}, worst {max(spreads):.1%}.",
        f"Error of the prediction: median {statistics.median(errors):.1%}, worst {max(errors):.1%}.",
        f"Pairs that differ by more than {APART:.0%} and are predicted in the wrong order: {len(wrong)}.",
        *wrong,
    ]
    return "\n".join(f"- {line}" for line in lines) + "\n"


def _untimed(results: dict[Setting, Result]) -> str:
    failed = [
        f"- {setting.folder}: `{case}` was not timed. {reason}"
        for setting, result in results.items()
        for case, reason in result.failures.items()
    ]
    return "\n".join(failed) + "\n" if failed else ""


def differences(results: dict[Setting, Result], earlier: dict[Setting, Result]) -> list[str]:
    """How much each time differs from that of an earlier run, the largest first."""
    found = []
    for setting, result in results.items():
        for case, summary in result.measured.items():
            if case in earlier[setting].measured:
                ratio = summary["median"] / earlier[setting].measured[case]["median"] - 1
                found.append((abs(ratio), f"{ratio:+.1%} {setting.folder} {case}"))
    found.sort(key=lambda pair: -pair[0])
    return [line for _, line in found]


def main(argv: list[str] | None = None) -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for the runs and tables.json")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each run; default: %(default)s")
    parser.add_argument("--against", type=Path, metavar="DIR", help="folder of an earlier run, to be compared")
    args = parser.parse_args(argv)
    for setting in settings():
        if not (args.output / setting.folder / "run.json").is_file():
            attention.main(setting.flags(args.rounds, args.output))
    results = {setting: Result.of(args.output / setting.folder) for setting in settings()}
    text = tables(results)
    print(text)
    write_table(DOCS / "benchmarks" / "devices.md", SCRIPT, ["", *text.splitlines(), ""])
    write_table(DOCS / "choose.md", SCRIPT, ["", *times(results, "16 x 1").splitlines(), ""])
    numbers = {setting.folder: vars(result) for setting, result in results.items()}
    (args.output / "tables.json").write_text(json.dumps(numbers, indent=1) + "\n")
    if args.against:
        earlier = {setting: Result.of(args.against / setting.folder) for setting in settings()}
        print("\n".join(differences(results, earlier)))


if __name__ == "__main__":
    run_main(main)
