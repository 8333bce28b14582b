"""The flags that describe a cluster."""

import os
from argparse import ArgumentParser, Namespace, _ArgumentGroup

from megatron.context_parallel.errors import UsageError

from .lab import Lab
from .launch import Loopback

Cluster = Lab | Loopback


def add_lab_flags(parser: ArgumentParser | _ArgumentGroup, required: bool = False) -> None:
    parser.add_argument("--nodes", type=int, required=required, help="number of emulated nodes")
    parser.add_argument("--ranks-per-node", type=int, help="default: 1")
    parser.add_argument(
        "--node-rate", metavar="RATE", help="NIC rate in each direction, such as 100mbit; default: unshaped"
    )
    parser.add_argument("--nic", choices=("node", "rank"), help="one NIC per node (default) or per rank")


def lab_of(args: Namespace, name: str, fair: bool = False) -> Lab:
    """The lab that the flags describe, not yet created. Raises UsageError for invalid values."""
    ranks_per_node = 1 if args.ranks_per_node is None else args.ranks_per_node
    return Lab(args.nodes, ranks_per_node, args.node_rate, args.nic or "node", name, fair)


def add_flags(parser: ArgumentParser) -> None:
    """Those of a program that runs in a cluster of its own."""
    group = parser.add_argument_group("cluster", "--ranks on loopback, or --nodes in an emulated cluster (root)")
    group.add_argument("--ranks", type=int, help="number of ranks on this machine's loopback")
    add_lab_flags(group)


def cluster_of(args: Namespace, fair: bool = False) -> Cluster:
    """The cluster that the flags of `add_flags` describe, not yet created; `fair`: as that of a `Lab`.

    Raises:
        UsageError: flags that cannot be combined, or invalid sizes.
    """
    if (args.ranks is None) == (args.nodes is None):
        raise UsageError("cluster: give either --ranks 4 (loopback) or --nodes 4 (emulated, root)")
    if args.ranks is None:
        return lab_of(args, name=f"bench{os.getpid()}", fair=fair)
    for flag in ("ranks_per_node", "node_rate", "nic"):
        if (value := getattr(args, flag)) is not None:
            raise UsageError(f"--{flag.replace('_', '-')} {value}: needs an emulated cluster; give --nodes 4")
    return Loopback(args.ranks)
