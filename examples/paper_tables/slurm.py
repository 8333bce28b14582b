"""One Slurm job for each row of a table, with the settings of examples/slurm."""

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.context_parallel.errors import UsageError

from .cells import ROOT
from .commands import LAUNCHER

if TYPE_CHECKING:
    from .measure import Job

HEAD = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=02:00:00
#SBATCH --output={folder}/slurm-%j.log
#SBATCH --no-requeue
#
# {row}. Flags of sbatch win over these lines; RANKS_PER_NODE replaces the ranks of a node that the commands ask for.
set -euo pipefail
cd {root}
export PYTHONPATH=$PWD OMP_NUM_THREADS=${{OMP_NUM_THREADS:-1}}
python=${{PYTHON:-$PWD/.venv/bin/python}}
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${{hosts%%$'\\n'*}}
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

measure() {{ # FOLDER NODES RANKS_PER_NODE PROGRAM FLAG...
    local folder=$1 nodes=$2 ranks=${{RANKS_PER_NODE:-$3}}
    shift 3
    # shellcheck disable=SC2016  # SLURM_NODEID differs from node to node
    srun --nodes="$nodes" --ntasks="$nodes" --kill-on-bad-exit=1 --cpus-per-task="${{SLURM_CPUS_PER_TASK:-1}}" \\
        bash -c 'exec "$0" -m torch.distributed.run --node-rank="$SLURM_NODEID" "$@"' "$python" \\
        --nnodes="$nodes" --nproc-per-node="$ranks" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \\
        "$@" >"$folder/log.txt" 2>&1 || echo "failed: see $folder/log.txt"
}}
"""


def submit(jobs: Sequence["Job"], name: str) -> None:
    """Writes a script for each row, beside the results of its commands, and submits it.

    Raises:
        UsageError: no `sbatch` here, or it refused a script.
    """
    for row in dict.fromkeys(job.row for job in jobs):
        of_row = [job for job in jobs if job.row == row]
        script = write_script(of_row, name)
        if not shutil.which("sbatch"):
            raise UsageError(f"--mode slurm: no sbatch here; wrote {script}, submit it on a login node")
        done = subprocess.run(["sbatch", str(script)], capture_output=True, text=True)
        if done.returncode:
            raise UsageError(f"--mode slurm: sbatch refused {script}: {done.stderr.strip().splitlines()[0]}")
        print(f"{row}: {done.stdout.strip()}")


def write_script(jobs: Sequence["Job"], name: str) -> Path:
    """Writes the script of one row. Raises UsageError for a command that no launcher starts."""
    text = script_of(jobs, name)
    for job in jobs:
        job.prepare()
    script = jobs[0].folder.parent / "measure.sbatch"
    script.write_text(text)
    return script


def script_of(jobs: Sequence["Job"], name: str) -> str:
    """The text of the script of one row. Raises UsageError for a command that no launcher starts."""
    folder, lines = jobs[0].folder.parent, []
    for job in jobs:
        if job.command[0] != LAUNCHER:
            raise UsageError(f"--mode slurm: {shlex.join(job.command)}: runs on one machine; give --mode run")
        program = job.words[job.words.index("--nproc-per-node") + 2 :]
        where = [str(job.folder), str(job.nodes), job.flag("--nproc-per-node")]
        lines.append(shlex.join(["measure", *where, *program]))
    nodes = max(job.nodes for job in jobs)
    places = {"folder": folder, "root": shlex.quote(str(ROOT))}
    head = HEAD.format(name=f"{name}-{folder.name}", nodes=nodes, row=jobs[0].row, **places)
    return head + "\n" + "\n".join(lines) + "\n"
