"""Writes the table of docs/cluster.md: the presets, with the numbers of their files.

Run it after a change of a preset. With --check it changes nothing, and fails if the page has another table.
"""

import argparse
import sys
from pathlib import Path

from megatron.context_parallel.cluster.description import PRESETS, Cluster, load_cluster

PAGE = Path(__file__).parents[1] / "docs" / "cluster.md"
BEGIN, END = "<!-- made by tools/make_presets_table.py -->\n", "<!-- end -->\n"
HEADINGS = ("preset", "nodes x devices", "device", "GB/s inside a node", "NICs of a node", "GB/s of a NIC", "source")


def table() -> str:
    lines = [f"| {' | '.join(HEADINGS)} |", "|" + "---|" * len(HEADINGS)]
    for path in sorted(PRESETS.iterdir(), key=lambda path: path.name):
        if path.name.endswith(".yaml"):
            lines.append(f"| {' | '.join(_row(load_cluster(path.name.removesuffix('.yaml'))))} |")
    return "\n".join(lines) + "\n"


def _row(cluster: Cluster) -> list[str]:
    inside, nics = cluster.inside, cluster.nics
    return [
        f"`{cluster.name}`",
        f"{cluster.nodes} x {cluster.devices_per_node}",
        cluster.device.name,
        _rate(inside.GB_s, inside.stream_GB_s) if inside else "",
        f"{nics.per_node}" if nics else "",
        _rate(nics.GB_s, nics.stream_GB_s) if nics else "",
        cluster.source.split(",")[0].split(".")[0].split(";")[0].split(":")[0],
    ]


def _rate(rate: float, stream: float | None) -> str:
    return f"{rate:.4g}, a stream {stream:.4g}" if stream else f"{rate:.4g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the table is another")
    args = parser.parse_args()
    before, rest = PAGE.read_text().split(BEGIN)
    old, after = rest.split(END)
    if args.check:
        print("the table is that of the presets" if old == table() else "the table is not that of the presets")
        return int(old != table())
    PAGE.write_text(before + BEGIN + table() + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
