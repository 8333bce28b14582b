"""A cluster in a box: network namespaces as nodes, joined by a switch, with links of a given rate. See docs/netlab.md.

python -m tools.netlab up --nodes 4 --ranks-per-node 4 --node-rate 100mbit
python -m tools.netlab run -- my_script.py --its-flags
python -m tools.netlab down
"""

import argparse

from megatron.context_parallel.cli.run_main import run_main
from megatron.context_parallel.errors import UsageError

from .flags import add_lab_flags, lab_of
from .lab import LABS, NAMESPACES, Lab, processes_inside
from .launch import Loopback, exit_on_signals, exits_as_ranks_did


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("netlab", description=__doc__, allow_abbrev=False, formatter_class=raw)
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="create a cluster (root)", allow_abbrev=False)
    add_lab_flags(up, required=True)
    run = commands.add_parser("run", help="run a Python script in all ranks", allow_abbrev=False)
    where = run.add_mutually_exclusive_group()
    where.add_argument("--ranks", type=int, help="ranks on plain loopback instead of a lab; needs no root")
    run.add_argument("script", nargs="+", metavar="CMD", help="after --: the script and its arguments")
    down = commands.add_parser("down", help="remove a cluster and its processes (root)", allow_abbrev=False)
    for command in (up, where, down):
        command.add_argument("--name", default="lab", help="name of the lab; default: %(default)s")
    commands.add_parser("status", help="list the clusters that are up")
    return parser.parse_args(argv)


@exits_as_ranks_did
def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    exit_on_signals()
    if args.command == "up":
        lab = lab_of(args, args.name)
        lab.up()
        print(lab)
    elif args.command == "run":
        cluster = Loopback(args.ranks) if args.ranks is not None else Lab.load(args.name)
        if cluster is None:
            raise UsageError(f"--name {args.name}: no such lab is up; start it with up, or give --ranks 4")
        cluster.run(args.script)
    elif args.command == "down":
        if lab := Lab.load(args.name):
            lab.down()
        else:
            print(f"{args.name} is not up")
    else:
        for path in sorted(LABS.glob("*.json")):
            lab = Lab.load(path.stem)
            inside = processes_inside(host for host in lab.hosts if (NAMESPACES / host).exists())
            print(f"{lab}, {len(inside)} processes")


if __name__ == "__main__":
    run_main(main, "netlab")
