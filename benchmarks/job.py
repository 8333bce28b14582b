"""The job of a benchmark: its start, the work of each rank, and the description of the machine beside results."""

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.context_parallel.cluster.description import Cluster as Description
from megatron.context_parallel.cluster.description import save_cluster
from tools.netlab import Cluster

ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "megatron-core", "numpy", "yunchang", "ring-flash-attn", "deepspeed")


def results_of(script: Path, job: dict, cluster: Cluster) -> list[dict]:
    """Starts the cluster, runs a script built on `run_job` in all its ranks, and returns what rank 0 wrote.

    Raises:
        subprocess.CalledProcessError: a rank failed; its error is on stderr.
    """
    os.environ["PYTHONWARNINGS"] = "ignore"  # every rank would repeat the warnings of libraries
    with tempfile.TemporaryDirectory() as folder, cluster:
        job_file, results = Path(folder) / "job.json", Path(folder) / "results.json"
        job_file.write_text(json.dumps(job))
        cluster.run([script, job_file, results])
        return json.loads(results.read_text())


def write_cluster(described: Description | None, folder: Path) -> str | None:
    """Writes the cluster whose devices are emulated to `cluster.yaml`, for the ranks and for predicted.py."""
    if described is None:
        return None
    path = folder.absolute() / "cluster.yaml"
    save_cluster(described, path)
    return str(path)


def run_job(measure: Callable[[dict], list[dict]]) -> None:
    """The life of a rank: `measure` gets the job, a JSON file named by the first argument, in a world of all ranks;
    rank 0 writes what it returns to the file named by the second."""
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    entries = measure(job)
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(entries))
    dist.barrier()
    dist.destroy_process_group()


def surroundings(cluster: Cluster) -> dict[str, object]:
    """The environment that results depend on besides the arguments, as plain data."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    models = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    return {
        "command": ["python", *map(_of_repository, sys.argv)],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cluster": cluster.describe(),
        "processor": models[0] if models else platform.machine(),
        "load_average": os.getloadavg()[0],  # before: other work on the machine
        "versions": versions,
    }


def _of_repository(word: str) -> str:
    """A word of a command; of an absolute path only what it is inside this repository, or its name."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
