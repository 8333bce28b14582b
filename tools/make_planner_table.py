"""Writes the table of docs/planner.md: the strategies that are predicted to be fastest on common clusters.

It takes minutes. Run it after a change of strategies, clusters or the cost model. With --check it changes nothing, and
fails if the page has another table.
"""

import argparse
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "planner.md"
BEGIN, END = "<!-- made by tools/make_planner_table.py -->\n", "<!-- end -->\n"
CLUSTERS = (  # preset, ranks
    ("dgx-h100", 8),
    ("dgx-h100", 32),
    ("dgx-a100", 32),
    ("b200-nvl72", 32),
    ("loongtrain", 32),
    ("gti", 32),
    ("attention2d-a100", 16),
    ("attention2d-h100", 16),
)
LENGTHS = (32, 64, 128, 256, 512, 1024)  # 1024 tokens
KV_HEADS = {"MHA": 32, "GQA": 8}  # for 32 heads


def cell(preset: str, ranks: int, length: int, kv_heads: int) -> str:
    """The fastest strategy, and how many times faster than the zigzag ring it is."""
    from megatron.context_parallel.cluster.description import load_cluster
    from megatron.context_parallel.cluster.search.candidates import Workload
    from megatron.context_parallel.cluster.search.planner import GroupDevices, fastest, search
    from megatron.context_parallel.strategies import parse_spec

    place, workload = GroupDevices(load_cluster(preset).part(ranks)), Workload(length * 1024, 32, kv_heads, 128)
    found = search(workload, place, max_simulated=24)
    how = {"heads": 32, "kv_heads": kv_heads}
    ring = [parse_spec("ring").plan(ranks, backward=backward, **how) for backward in (False, True)]
    simulated, _ = fastest({"ring": ring}, place, workload)
    return f"`{found.best}` {simulated['ring'].seconds / found.ranked[found.best].seconds:.2f}"


def table() -> str:
    lines = [f"| cluster, ranks | tokens | {' | '.join(KV_HEADS)} |", "|---|---|" + "---|" * len(KV_HEADS)]
    for preset, ranks in CLUSTERS:
        for i, length in enumerate(LENGTHS):
            cells = [cell(preset, ranks, length, kv_heads) for kv_heads in KV_HEADS.values()]
            name = f"`{preset}`, {ranks}" if i == 0 else ""
            size = "1M" if length == 1024 else f"{length}K"
            lines.append(f"| {name} | {size} | {' | '.join(cells)} |")
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the table is another")
    args = parser.parse_args()
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    old, after = rest.split(END)
    new = table()
    if args.check:
        print("current" if new == old else "docs/planner.md has another table: run tools/make_planner_table.py")
        return int(new != old)
    PAGE.write_text(before + BEGIN + new + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
