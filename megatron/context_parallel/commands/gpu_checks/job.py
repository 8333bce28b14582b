"""Processes of one rank that a stage starts: a program with its words, on the GPU or without it."""

import os
import subprocess
import sys
from pathlib import Path

OF_LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}  # a rank has no others


def start(program: str, words: list[str], log: Path, gpu: bool) -> subprocess.Popen:
    """Runs `python -c program words`; its output goes to the file `log`."""
    env = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)  # a checkout that is not installed, from any folder
    if not gpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
    with log.open("w") as file:
        return subprocess.Popen([sys.executable, "-c", program, *words], env=env, stdout=file, stderr=file)


def end(job: subprocess.Popen, log: Path, limit: int) -> str:
    """Waits for a process, at most `limit` seconds. Returns the last line of one that failed."""
    try:
        status = job.wait(limit)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
        return f"did not end in {limit} s"
    said = log.read_text().strip().splitlines() or ["no output"]
    return said[-1][:200] if status else ""
