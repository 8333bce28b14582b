"""Where the ranks of a benchmark run: the flags, and what is written beside results."""

import json
import os
import platform
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

from megatron.context_parallel.errors import UsageError
from tools.netlab import Lab, Loopback

PACKAGES = ("torch", "megatron-core", "numpy", "yunchang", "ring-flash-attn", "deepspeed")


def add_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("cluster", "--ranks on loopback, or --nodes in an emulated cluster (root)")
    group.add_argument("--ranks", type=int, help="ranks on this machine's loopback")
    group.add_argument("--nodes", type=int, help="emulated nodes")
    group.add_argument("--ranks-per-node", type=int, help="default: 1")
    group.add_argument("--node-rate", metavar="RATE", help="of a network interface, such as 100mbit; default: unshaped")
    group.add_argument("--nic", choices=("node", "rank"), help="one interface per node (default) or per rank")


def cluster_of(args: Namespace) -> Lab | Loopback:
    """The cluster that the flags describe, not yet there.

    Raises:
        UsageError: flags that do not go together, or sizes that cannot be.
    """
    if (args.ranks is None) == (args.nodes is None):
        raise UsageError("cluster: give either --ranks 4 (loopback) or --nodes 4 (emulated, root)")
    if args.ranks is not None:
        for flag in ("ranks_per_node", "node_rate", "nic"):
            if (value := getattr(args, flag)) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} {value}: needs an emulated cluster; give --nodes 4")
        return Loopback(args.ranks)
    nic, ranks_per_node = args.nic or "node", 1 if args.ranks_per_node is None else args.ranks_per_node
    return Lab(args.nodes, ranks_per_node, args.node_rate, nic, name=f"bench{os.getpid()}")


def size(cluster: Lab | Loopback) -> int:
    return cluster.ranks if isinstance(cluster, Loopback) else cluster.nodes * cluster.ranks_per_node


def results_of(script: Path, job: dict, cluster: Lab | Loopback) -> list[dict]:
    """Starts the cluster, runs a script built on `rounds.run_job` in all its ranks, and returns what rank 0 wrote.

    Raises:
        subprocess.CalledProcessError: a rank failed; its error is on stderr.
    """
    os.environ["PYTHONWARNINGS"] = "ignore"  # what libraries warn of, every rank would say again
    there = nullcontext(cluster) if isinstance(cluster, Loopback) else cluster
    with tempfile.TemporaryDirectory() as folder, there:
        job_file, results = Path(folder) / "job.json", Path(folder) / "results.json"
        job_file.write_text(json.dumps(job))
        cluster.run([script, job_file, results])
        return json.loads(results.read_text())


def surroundings(cluster: Lab | Loopback) -> dict[str, object]:
    """What results depend on besides the arguments, as plain data."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    models = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    return {
        "command": ["python", *sys.argv],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cluster": cluster.describe(),
        "processor": models[0] if models else platform.machine(),
        "load_average": os.getloadavg()[0],  # before: other work on the machine
        "versions": versions,
    }
