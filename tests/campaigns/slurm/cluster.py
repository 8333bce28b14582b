"""A Slurm cluster of two nodes and a spare on this machine, and the commands of its user."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[3]
PATIENCE = 600  # seconds until a test gives up: only against hanging
INSIDE = ["--mount", "--pid", "--net", "--uts"]
LATE = 12  # seconds in which slurmctld may still end what it started before, and would end the new start


class Slurm:
    """The cluster of `cluster.sh` in `directory`, where jobs also have their data, logs and checkpoints."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        box = ["unshare", *INSIDE, "--fork", "--kill-child", "--mount-proc"]
        self.box = subprocess.Popen(
            [*box, "bash", str(ROOT / "tests/campaigns/slurm/cluster.sh"), str(directory)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(directory / "cluster.log").open("w"),
            text=True,
        )
        assert self.box.stdout is not None
        if self.box.stdout.readline() != "ready\n":
            raise AssertionError((directory / "cluster.log").read_text())
        children = Path(f"/proc/{self.box.pid}/task/{self.box.pid}/children").read_text().split()
        self.enter = ["nsenter", "--target", children[0], *INSIDE, "--wd", "--"]

    def close(self) -> None:
        assert self.box.stdin is not None
        self.box.stdin.close()
        self.box.wait(30)

    def run(self, *command: str, **environment: str) -> str:
        """The output of `command`, run from the repository on the controlling machine of the cluster."""
        base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        base |= {"SLURM_CONF": str(self.directory / "slurm.conf"), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([*self.enter, *command], env=base | environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def on_node(self, node: str, *command: str) -> str:
        """The output of `command` in the network of `node`."""
        return self.run("ip", "netns", "exec", node, *command)

    def fail(self, node: str) -> None:
        """End everything on `node` at once."""
        self.run("bash", "-c", f"kill -9 $(ip netns pids {node})")


class Job:
    """A submitted job, its log and its checkpoints."""

    def __init__(self, slurm: Slurm, name: str) -> None:
        self.slurm, self.save = slurm, slurm.directory / name
        self.log = slurm.directory / f"{name}.log"
        self.number = ""

    def submit(self, *flags: str, options: str = "", **environment: str) -> "Job":
        """`sbatch`, on two nodes with two ranks on the CPUs of each."""
        script = [str(ROOT / "examples/slurm/pretrain.sbatch"), *flags]
        command = ["sbatch", *self.options(), *options.split(), *script]
        return self.took(self.slurm.run(*command, **({"RANKS_PER_NODE": "2"} | environment)))

    def options(self) -> list[str]:
        return ["--nodes=2", "--gpus-per-node=0", "--cpus-per-task=2", f"--output={self.log}"]

    def took(self, reply: str) -> "Job":
        assert reply.startswith("Submitted batch job "), reply
        self.number = reply.split()[-1]
        return self

    def record(self) -> str:
        return self.slurm.run("scontrol", "show", "job", self.number)

    def show(self, field: str) -> str:
        """A field of the record."""
        return next(word.partition("=")[2] for word in self.record().split() if word.startswith(f"{field}="))

    def update(self, change: str) -> None:
        self.slurm.run("scontrol", "update", f"JobId={self.number}", change)

    def wait(self, met: Callable[[], object]) -> None:
        """Waits until `met()` is true; fails if the job has left the queue."""
        deadline = time.monotonic() + PATIENCE
        while not met():
            queued = self.queued()  # the state of a job that is being requeued may look like an end for a moment
            assert (queued or met()) and time.monotonic() < deadline, f"{self.record()}\n{self.text()}"
            time.sleep(0.2)

    def queued(self) -> bool:
        """Whether the job waits, runs, or still completes."""
        return bool(self.slurm.run("squeue", "--noheader", "--jobs", self.number))

    def wait_for(self, state: str) -> None:
        """Waits until the job has this state."""
        self.wait(lambda: self.show("JobState") == state)

    def wait_for_launchers(self) -> None:
        """Waits until both launchers run. They import torch for seconds, before any rank starts."""
        self.wait(lambda: {*re.findall(r" --node-rank=(\d) ", self.slurm.run("ps", "-eo", "args"))} == {"0", "1"})

    def cancel(self) -> None:
        """`scancel`, and wait until all of the job is gone."""
        self.slurm.run("scancel", self.number)
        self.wait(lambda: not self.queued())

    def go_on(self) -> None:
        """Start a requeued job as soon as nothing of its last start is left: Slurm would wait for two minutes."""
        self.wait_for("PENDING")
        self.wait(lambda: f"slurmstepd: [{self.number}." not in self.slurm.run("ps", "-eo", "args"))
        time.sleep(LATE)
        self.slurm.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def losses(self) -> dict[int, float]:
        """The loss of each iteration so far, as the newest start has it."""
        path = self.save / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        done = (json.loads(line) for line in lines if line.endswith("\n"))
        return {line["iteration"]: line["lm_loss"] for line in done}

    def saved(self) -> int:
        """The iteration of the newest checkpoint."""
        path = self.save / "latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.exists() else 0


def missing() -> str | None:
    """Why Slurm is not available."""
    programs = [name for name in ("slurmctld", "slurmd", "munged", "ip", "unshare") if shutil.which(name) is None]
    if programs:
        return f"no {', '.join(programs)} here: apt-get install --no-install-recommends slurm-wlm munge iproute2"
    if subprocess.run(["unshare", *INSIDE, "true"], capture_output=True).returncode:
        return "a Slurm of several nodes needs root and the right to make namespaces"
    return None
