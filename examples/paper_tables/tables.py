"""A table or a figure of a paper: predicted for its testbed, or measured, beside the paper's numbers.

bash examples/paper_tables/loongtrain/table_4.sh                      predicted, in seconds, without a GPU
bash examples/paper_tables/loongtrain/table_4.sh --mode show          the script, nodes and expected time of each row
bash examples/paper_tables/loongtrain/table_4.sh --mode run           measured on this machine
bash examples/paper_tables/loongtrain/table_4.sh --mode slurm         measured by one Slurm job for each row
bash examples/paper_tables/loongtrain/table_4.sh --mode collect       what these jobs measured
"""

import argparse
import sys
from pathlib import Path

from megatron.context_parallel.cli.run_main import run_main

MODES = ("simulate", "show", "run", "slurm", "collect")


def parse_args(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The flags here, and those after --, which win over the flags of the commands that measure."""
    words = sys.argv[1:] if argv is None else argv
    own, others = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("paper", help="folder of a paper, such as loongtrain")
    parser.add_argument("table", help="such as table_4 or figure_5")
    parser.add_argument("--mode", choices=MODES, default="simulate", help="default: %(default)s")
    parser.add_argument("--row", metavar="LABEL", help="only this row; default: all rows")
    parser.add_argument("--column", metavar="LABEL", help="only this column; default: all columns")
    parser.add_argument(
        "--output", type=Path, default=Path("paper_tables_out"), metavar="DIR", help="default: %(default)s"
    )
    return parser.parse_args(own), others


def main(argv: list[str] | None = None) -> int:
    args, others = parse_args(argv)
    from .simulate import simulate_table

    if args.mode == "simulate":
        simulate_table(args, others)
    else:
        from .measure import measure_table

        measure_table(args, others)
    return 0


if __name__ == "__main__":
    run_main(main, "paper_tables")
