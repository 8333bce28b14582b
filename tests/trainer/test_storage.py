"""A directory has one job at a time, all ranks raise the same disk error, and nothing outlives a launcher."""

import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
from argparse import Namespace
from functools import wraps
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.filesystem import FileSystem

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer import log
from megatron.context_parallel.trainer.checkpoint import publish, storage
from megatron.context_parallel.trainer.checkpoint.save_lock import check_save_lock, save_lock
from megatron.context_parallel.trainer.checkpoint.store import latest_iteration
from megatron.context_parallel.trainer.faults import lifetime
from tests.support import training_case

FULL = OSError(errno.ENOSPC, "No space left on device", "/where")


def lock(directory: str) -> str:
    try:
        with save_lock(Namespace(save=directory, rank=dist.get_rank())):
            check_save_lock()
            return "locked"
    except UsageError as error:
        return str(error)


def test_a_second_job_is_refused_on_all_ranks(ranks, tmp_path):
    save = tmp_path / "run"
    assert ranks(2, lock, str(save)) == ["locked", "locked"]
    with open(save / "lock", "r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        (told, same) = ranks(2, lock, str(save))
    assert told == same
    assert f"--save {save}: in use by another job (process " in told and os.uname().nodename in told
    assert ranks(2, lock, str(save)) == ["locked", "locked"]


def lose_the_directory(directory: str) -> None:
    with save_lock(Namespace(save=directory, rank=0)):
        Path(directory).rename(directory + "-moved")
        Path(directory).mkdir()
        with pytest.raises(FileNotFoundError, match="removed or unmounted"):
            check_save_lock()


def test_a_directory_that_was_replaced_is_noticed(ranks, tmp_path):
    ranks(1, lose_the_directory, str(tmp_path / "run"))


STEPS = {  # of a save: which function takes it, on which rank the disk is full
    "shard": (filesystem_async, "_write_item", 1),
    "metadata": (FileSystem, "rename", 0),
    "publish": (publish, "_flush", 0),
}


def run_with_a_full_disk(directory: str, step: str, on_error: str) -> str:
    """Train for 4 iterations and save every 2; the first save fails at `step`."""
    owner, name, victim = STEPS[step]
    failures = [FULL] if dist.get_rank() == victim else []
    original = getattr(owner, name)

    @wraps(original)
    def fail_once(*args, **kwargs):
        if failures:
            raise failures.pop()
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, fail_once)
        try:
            training_case.train("llama", train_iters=4, save=directory, save_interval=2, save_on_error=on_error)
        except UsageError as error:
            return str(error)
    return "trained"


@pytest.mark.parametrize("step", STEPS)
def test_a_full_disk_is_told_alike_on_all_ranks(ranks, tmp_path, step):
    for told in ranks(2, run_with_a_full_disk, str(tmp_path), step, "stop"):
        assert told == (
            f"--save {tmp_path}: iteration 2 was not saved: No space left on device (/where); free some space, or give "
            "another --save"
        )
    assert list(tmp_path.iterdir()) == []
    assert ranks(2, run_with_a_full_disk, str(tmp_path), step, "continue") == ["trained", "trained"]
    assert latest_iteration(tmp_path) == 4 and not (tmp_path / "iter_0000002").exists()


def test_room_is_looked_for_before_a_save(tmp_path, monkeypatch):
    args = Namespace(save=str(tmp_path), params_dtype=torch.bfloat16, no_save_optim=False)
    monkeypatch.setattr(storage, "model_of", lambda args: Namespace(parameters=10**15))
    with pytest.raises(
        OSError, match=r"a checkpoint needs 14000000000\.0 MB \(14000000000000000 bytes\), and .* are free"
    ):
        storage.begin_save(args)
    monkeypatch.setattr(storage, "model_of", lambda args: Namespace(parameters=10))
    storage.begin_save(args)


def test_metrics_that_cannot_be_written_do_not_stop_a_run(capsys):
    run = log.RunLog.__new__(log.RunLog)
    run.speaks, run.warned, run.bar, run.tensorboard, run.wandb = True, False, None, None, None
    run.metrics = open("/dev/full", "w")  # noqa: SIM115
    run.evaluation_done(1, "test", 2.0)
    run.evaluation_done(2, "test", 2.0)
    run.close()
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert "metrics cannot be written ([Errno 28] No space left on device" in warning


# --------------------------------------------------------------------------------------------------- processes

RANK = """
import importlib.util, os, sys, time
spec = importlib.util.spec_from_file_location("lifetime", sys.argv[1])
lifetime = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lifetime)
lifetime.end_with_parent()
helper = os.fork()
if helper:
    print(os.getpid(), helper, flush=True)
time.sleep(1000)
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize("torchrun", [True, False])
def test_a_rank_and_its_helpers_end_with_torchrun(torchrun):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    environment |= {"TORCHELASTIC_RUN_ID": "1"} if torchrun else {}
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK, lifetime.__file__], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert launcher.stdout
    rank, helper = map(int, launcher.stdout.readline().split())
    launcher.kill()
    launcher.wait()
    if not torchrun:
        assert runs(rank) and runs(helper)
        os.kill(rank, signal.SIGKILL)
    ended, _, _ = select.select([launcher.stdout], [], [], 60)
    assert ended and launcher.stdout.read() == ""  # all that had it open have ended


def runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
