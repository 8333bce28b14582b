"""No process outlives its launcher, two jobs never save into one directory, and a failed save prints one line."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from . import actions
from .bench import Bench, losses
from .job import Outcome, run_job, wait_for_go
from .moments import Fault, Moment


def disk_error(number: int):
    return actions.fail_with(OSError(number, os.strerror(number), "/where"))


def said(outcome: Outcome) -> list[str]:
    """The lines after the fault, without warnings that the run always prints."""
    return [line.text for line in outcome.after]


def check_resume(bench: Bench, save: Path, layout: str = "cp2") -> None:
    resumed = bench.run(layout, save)
    assert set(resumed.statuses.values()) == {0}, resumed.text
    assert losses(save) == bench.reference(layout).losses


# --------------------------------------------------------------------------------------------------- processes


@pytest.mark.parametrize("share", [0.0, 0.2, 0.4, 0.6, 0.8])
def test_rank_0_killed_in_a_save_leaves_nothing_running(bench, share):
    events = bench.reference("cp2").events[0]["save", 4]
    save = bench.fresh("killed in a save")
    fault = Fault(Moment("save", 4, int(share * events)), 0, actions.kill)
    outcome = bench.run("cp2", save, fault=fault, ends_others=True, more="--num-workers 2")
    assert outcome.statuses[0] == -signal.SIGKILL and not outcome.left and not outcome.late
    check_resume(bench, save)


@pytest.mark.parametrize("phase", ["forward", "save", "data"])
def test_ranks_and_loaders_end_with_their_launcher(bench, phase):
    save = bench.fresh("launcher killed")
    fault = Fault(Moment("forward", 4) if phase == "data" else Moment(phase, 4), 0, actions.kill_launcher)
    outcome = bench.run("cp2", save, fault=fault, more="--num-workers 2" if phase == "data" else "")
    assert set(outcome.statuses.values()) == {-signal.SIGKILL}, outcome.text
    assert not outcome.left and not outcome.late and said(outcome) == []
    check_resume(bench, save)


def test_without_a_launcher_ranks_outlive_their_parent(bench):
    # As with nohup: the shell that started them may end.
    fault = Fault(Moment("forward", 4), 0, actions.kill_launcher)
    outcome = bench.run("cp2", fault=fault, agent_store=False)
    assert not outcome.late and any("iteration 6/6" in line.text for line in outcome.lines), outcome.text


@pytest.mark.parametrize(
    ("phase", "iteration", "line"),
    [
        ("forward", 4, "interrupted at iteration 3; the last checkpoint is iteration 2"),
        ("save", 2, "interrupted at iteration 2; no checkpoint was saved"),
        ("start-up", 0, "interrupted at iteration 0; no checkpoint was saved"),
    ],
)
def test_ctrl_c_is_one_line(bench, phase, iteration, line):
    # Rank 0 says the line, so its own moment decides the iteration: another rank may be one ahead.
    fault = Fault(Moment(phase, iteration, 1), 0, actions.interrupt_all)
    outcome = bench.run("cp2", bench.fresh("interrupted"), fault=fault, more="--num-workers 2")
    assert said(outcome) == [line]
    assert set(outcome.statuses.values()) == {130} and not outcome.left


def test_ctrl_c_before_the_job_is_one_line(bench):
    outcome = bench.run("cp2", fault=Fault(Moment("join"), 1, actions.interrupt_all))
    assert said(outcome) in (["interrupted"], ["interrupted at iteration 0"])  # rank 0 may be further
    assert set(outcome.statuses.values()) == {130}


# ------------------------------------------------------------------------------------------- what the host lacks


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_a_killed_data_worker_is_named(bench, phase):
    fault = Fault(Moment(phase, 4, 1), 1, actions.kill_helpers)
    outcome = bench.run("cp2", bench.fresh("worker"), fault=fault, agent_store=False, more="--num-workers 1")
    (line,) = said(outcome)
    assert re.match(r"rank 1: its data worker \(process \d+\) was ended by a signal \(Killed\), which the system", line)
    assert not outcome.left and not outcome.late


def test_an_error_in_a_data_worker_is_told(bench):
    fault = Fault(Moment("helper", 1, 2), 1, disk_error(errno.EIO))
    outcome = bench.run("cp2", fault=fault, agent_store=False, more="--num-workers 1")
    (line,) = said(outcome)
    assert line.startswith(f"rank 1: in a data worker, OSError: [Errno 5] {os.strerror(errno.EIO)}: '/where'; details")


@pytest.mark.parametrize(("most", "more"), [(60, " is too low"), (140, " is too low")])
def test_too_few_open_files_are_named(bench, most, more):
    fault = Fault(Moment("start-up"), 1, partial(actions.few_files, most))
    outcome = bench.run("cp2", fault=fault, ends_others=True, more="--num-workers 2")
    (line,) = [text for text in said(outcome) if "ulimit" in text]
    assert f"rank 1: ulimit -n {most}{more}" in line and len(said(outcome)) == 1


@pytest.mark.parametrize(
    ("kilobytes", "line"),
    [
        (4, "error: --num-workers 2: the workers cannot start (No space left on device in /dev/shm); give 0"),
        (112, "rank 1: /dev/shm is too full for a batch of a data worker; free space there, or give --num-workers 0"),
    ],
)
def test_full_shared_memory_is_named(bench, kilobytes, line):
    if os.geteuid():
        pytest.skip("needs the right to mount")
    fault = Fault(Moment("start-up"), 1, partial(actions.small_shared_memory, kilobytes))
    outcome = bench.run("cp2", fault=fault, agent_store=False, more="--num-workers 2")
    assert [line in text for text in said(outcome)] == [True], outcome.text
    assert not outcome.late


# ----------------------------------------------------------------------------------------------------- storage


def test_a_second_job_is_refused_until_the_first_ends(bench):
    save = bench.fresh("locked")
    seconds: list[Outcome] = []
    fault = Fault(Moment("forward", 4), 1, wait_for_go)
    first = bench.run(
        "cp2", save, fault=fault, meanwhile=lambda: seconds.append(bench.run("cp2", save, ends_others=True))
    )
    starting, line = [line.text for line in seconds[0].lines if line.rank == 0]
    assert starting == "starting 2 ranks ..."
    assert seconds[0].statuses[0] == 2
    assert f"--save {save}: in use by another job (process " in line and os.uname().nodename in line
    assert set(first.statuses.values()) == {0}, first.text
    assert losses(save) == bench.reference("cp2").losses


def test_a_killed_job_leaves_no_lock(bench):
    save = bench.fresh("lock left")
    bench.run("cp2", save, fault=Fault(Moment("forward", 4), 0, actions.kill), ends_others=True)
    assert (save / "lock").read_text().startswith("process ")
    check_resume(bench, save)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("share", [0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_a_failed_save_is_one_line_and_loses_nothing(bench, victim, share):
    events = bench.reference("cp2").events[victim]["save", 4]
    save = bench.fresh("disk full")
    fault = Fault(Moment("save", 4, int(share * events)), victim, disk_error(errno.ENOSPC))
    outcome = bench.run("cp2", save, fault=fault, ends_others=True)
    assert not outcome.left and not outcome.late
    if outcome.statuses[victim]:  # otherwise the file was not needed
        (line,) = said(outcome)
        told = f"--save {save}: iteration 4 was not saved: No space left on device" in line and "free some" in line
        assert told or line.startswith(f"rank {victim}: OSError: [Errno 28] No space left on device")
        assert not list(save.glob("*.incomplete")) or not told
        check_resume(bench, save)


def test_a_save_that_fails_on_another_rank_is_said_by_rank_0_alone(bench):
    """Without a launcher that ends the others, as on another node."""
    save = bench.fresh("fails on rank 1")
    moment = Moment("save", 4, bench.reference("cp2").events[1]["save", 4] - 1)
    outcome = bench.run("cp2", save, fault=Fault(moment, 1, disk_error(errno.ENOSPC)), agent_store=False)
    (line,) = said(outcome)
    assert line.startswith(f"pretrain_gpt.py: error: --save {save}: iteration 4 was not saved: No space left on device")
    assert outcome.statuses == {0: 2, 1: 2} and not outcome.late


@pytest.mark.parametrize("part", ["", "common.pt", "__0_0.distcp"])
def test_a_checkpoint_that_is_deleted_while_it_is_loaded_is_named(bench, part):
    save = bench.copy("cp2")
    last = save / "iter_0000006"

    def delete() -> None:
        shutil.rmtree(last) if not part else (last / part).unlink()

    outcome = bench.run("cp2", save, fault=Fault(Moment("load", 0, 1), 0, delete), agent_store=False)
    (line,) = said(outcome)
    gone = f"{last.name}/{part} is missing" if part else f"{last.name} is missing"
    who, _, what = line.partition(": error: ")
    assert who in ("pretrain_gpt.py", "rank 1")  # whoever finds it first
    assert what == f"--load {save}: {gone}, after it was checked; give another --load"


@pytest.mark.parametrize(("victim", "before_end"), [(0, 4), (0, 20), (1, 1)])
@pytest.mark.parametrize("number", [errno.EROFS, errno.EDQUOT])
def test_training_goes_on_if_asked(bench, victim, before_end, number):
    """One rank cannot write a file, or cannot read back what it wrote."""
    save = bench.fresh("goes on")
    moment = Moment("save", 4, bench.reference("cp2").events[victim]["save", 4] - before_end)
    outcome = bench.run("cp2", save, fault=Fault(moment, victim, disk_error(number)), more="--save-on-error continue")
    assert set(outcome.statuses.values()) == {0}, outcome.text
    (line,) = [line for line in said(outcome) if line.startswith("warning")]
    assert f"iteration 4 was not saved: {os.strerror(number)}" in line and line.endswith("training continues")
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert losses(save) == bench.reference("cp2").losses


@pytest.mark.parametrize("put_file", [False, True])
def test_a_directory_that_vanishes_is_named(bench, put_file):
    save = bench.fresh("vanishes")

    def vanish() -> None:
        save.rename(save.with_name(save.name + "-moved"))
        if put_file:
            save.touch()

    outcome = bench.run("cp2", save, fault=Fault(Moment("optimizer", 4), 0, vanish), ends_others=True)
    (line,) = [text for text in said(outcome) if not text.startswith("warning: metrics")]
    assert f"--save {save}: iteration 4 was not saved: the directory was removed or unmounted" in line
    assert outcome.statuses[0] == 2 and not save.is_dir()


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a file system of so many kilobytes."""
    mounted = []

    def mount(kilobytes: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(tmp_path)]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs the right to mount")
        mounted.append(tmp_path)
        return tmp_path

    yield mount
    for path in mounted:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.parametrize("room", range(10, 120, 10))
def test_a_full_disk(bench, small_disk, room):
    """`room` is the free space for the second checkpoint, in percent of its size; metrics need space too."""
    size = sum(path.stat().st_size for path in (bench.reference("cp2").save / "iter_0000002").iterdir())
    save = small_disk(size * (100 + room) // 100 // 1000 + 40)
    outcome = bench.run("cp2", save, ends_others=True)
    errors = [line.text for line in outcome.lines if "error:" in line.text]
    if outcome.statuses[0] == 0:
        assert not errors and room >= 100
        return
    assert len(errors) == 1 and "was not saved: No space left on device" in errors[0], outcome.text
    assert outcome.statuses[0] == 2 and not outcome.left
    assert not list(save.glob("*.incomplete")) and (save / "latest_checkpointed_iteration.txt").read_text() in "24"


# ---------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "data"])
def test_a_failed_rank_says_one_line(bench, phase):
    save = bench.fresh("fails")
    outcome = bench.run("cp2", save, fault=Fault(Moment(phase, 3, 1), 1, actions.fail), ends_others=True)
    (line,) = said(outcome)
    assert line.startswith("rank 1: RuntimeError: injected")
    log = save / "crash" / "rank-1.log"
    assert line.endswith(f"details in {log}") and "Traceback" in log.read_text()
    assert outcome.statuses[1] == 1 and outcome.statuses[0] != 0 and not outcome.left


def test_an_error_on_all_ranks_is_one_line(bench):
    outcome = run_job(bench.flags("cp2", more="--lr 1e30 --init-method-std 1e6"), 2, ends_others=True)
    assert len([line for line in outcome.lines if "FloatingPointError" in line.text]) == 1, outcome.text


# ------------------------------------------------------------------------------------------------ the launcher

RANKS = """
import os, signal, sys, time
how = sys.argv[1]
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else sys.exit(3 if how else 0)
time.sleep(0 if how == "" else 1000)
"""


@pytest.mark.parametrize(
    ("how", "status", "told"), [("killed", 137, "rank 1 was ended by SIGKILL\n"), ("fails", 3, ""), ("", 0, "")]
)
def test_cp_torchrun_is_short(tmp_path, how, status, told):
    (tmp_path / "ranks.py").write_text(RANKS)
    launcher = Path(__file__).parents[3] / "tools" / "torchrun.py"
    command = [sys.executable, str(launcher), "--standalone", "--nproc-per-node", "2", str(tmp_path / "ranks.py"), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", told)
