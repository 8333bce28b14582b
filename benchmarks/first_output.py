"""Prints how long each command takes to its first line of output and to its end, and the CPU time of its `--help`.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/first_output.py [COMMAND ...]

The first line is that of standard output or standard error. The commands run one after the other. They use a tiny model
that is trained first, in a temporary folder. The server is stopped when it is ready.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.table import Table

from megatron.context_parallel.cli.run_main import announce, run_main
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.progress import tracked

ROOT = Path(__file__).parents[1]
READY = "listening at "  # the last line of the server before it waits for requests
TRAIN = "--preset tiny-llama --mock-data --context-parallel-size 2 --micro-batch-size 1 --lr 1e-3"
TRAIN += " --train-iters 3 --log-interval 1"
COMMANDS = {  # name: (program, flags, ranks under torchrun or None); {run} and {new} are folders
    "pretrain": ("pretrain_gpt.py", f"{TRAIN} --save {{run}}", 2),
    "pretrain, auto": ("pretrain_gpt.py", f"{TRAIN} --cp-strategy auto", 2),
    "pretrain, dry run": (
        "pretrain_gpt.py",
        "--preset llama3-8b --micro-batch-size 1 --bf16 --dry-run",
        None,
    ),
    "plan": ("tools/plan.py", "mesh ring --ranks 64", None),
    "plan, auto": ("tools/plan.py", "auto --ranks 64 --seq-length 131072 --cluster dgx-h100", None),
    "plan, page": ("tools/plan.py", "mesh --ranks 16 --html {new}/plan.html", None),
    "plan_search": ("tools/plan_search.py", "--model llama3-8b --seq-length 128K --cluster dgx-h100 --nodes 4", None),
    "cluster_probe": ("tools/cluster_probe.py", "--quick --output {new}/cluster.yaml", 2),
    "generate": ("tools/generate.py", "--load {run} --prompt def --max-new-tokens 5", 2),
    "server": ("tools/run_text_generation_server.py", "--load {run} --port 0", 2),
    "checkpoint, verify": ("tools/checkpoint.py", "verify {run}", None),
    "convert_hf": ("tools/convert_hf.py", "to-hf --load {run} --save {new}/huggingface", None),
    "preprocess_data": ("tools/preprocess_data.py", "--input README.md --output-prefix {new}/readme", None),
    "plot_loss": ("tools/plot_loss.py", "{run}", None),
    "stuck": ("tools/stuck.py", "", None),
    "gpu_check": ("tools/gpu_check.py", "", None),
    "paper table": ("-m", "examples.paper_tables.tables mesh_attention table_2 --output {new}", None),
}


def timed(words: list[str]) -> tuple[float, float, int]:
    """Wall seconds to the first line and to the end of a command, and its exit status. A server is stopped."""
    start = time.perf_counter()
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    first = None
    for line in process.stdout:
        first = first or time.perf_counter() - start
        if line.startswith(READY):
            process.terminate()
    status = process.wait()
    end = time.perf_counter() - start
    return first or end, end, status


def cpu_of_help(program: list[str]) -> float:
    """CPU seconds, of user and system, of a program that prints its help."""
    process = subprocess.Popen([sys.executable, *program, "--help"], cwd=ROOT, stdout=subprocess.DEVNULL)
    _, _, usage = os.wait4(process.pid, 0)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commands", nargs="*", default=[*COMMANDS], metavar="COMMAND", help=", ".join(COMMANDS))
    given = parser.parse_args().commands
    if unknown := [name for name in given if name not in COMMANDS]:
        parser.error(f"COMMAND {unknown[0]!r}: not one of {', '.join(COMMANDS)}")
    names = [name for name in COMMANDS if name in given]  # pretrain first: others need its run
    table = Table("command", "first line, s", "end, s", "status", "CPU of --help, s")
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        launch = [sys.executable, "tools/torchrun.py", "--standalone", "--nproc-per-node"]
        if "pretrain" not in names:
            announce("training a tiny model")
            subprocess.run([*launch, "2", "pretrain_gpt.py", *TRAIN.split(), "--save", str(run)], cwd=ROOT, check=True)
        for name in tracked(names, "commands"):
            announce(name)
            program, flags, ranks = COMMANDS[name]
            words = shlex.split(flags.format(run=run, new=folder))
            start = [sys.executable] if ranks is None else [*launch, str(ranks)]
            first, end, status = timed([*start, program, *words])
            alone = [program, words[0]] if program == "-m" else [program]
            table.add_row(name, f"{first:.1f}", f"{end:.1f}", str(status), f"{cpu_of_help(alone):.2f}")
    show(table)


if __name__ == "__main__":
    run_main(main, "first_output")
