"""Faults in a running job."""

import re
import subprocess
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from . import actions
from .bench import losses
from .job import Outcome, wait_for_go
from .moments import Fault, Moment
from .verdict import (
    DETECTED,
    LOST,
    NAMED,
    SECONDS,
    WITHIN,
    Case,
    all_failed,
    all_well,
    ended_in_time,
    few_lines,
    first_line,
    names_rank,
    resumes,
)

ANY = ("start-up", "load", "data", "forward", "backward", "optimizer", "evaluation", "save")
COMPUTING = ("forward", "backward", "optimizer", "evaluation")
PATIENCE = 6.0  # seconds that a stopped rank is waited for
JOINS = 9  # events of "join" that are tried; groups are made in the last two
LATE = 3  # seconds


def _strike(case: Case, action, *phases: str, more: str = "", first: int = 1, **how) -> tuple[Path, Outcome, int]:
    moment, victim = case.draw_moment(*phases, first=first)
    save = case.bench.fresh(case.layout)
    how.setdefault("agent_store", case.random.random() < 0.5)
    how.setdefault("apart", case.random.random() < 0.5)
    outcome = case.bench.run(case.layout, save, more=more, fault=Fault(moment, victim, action), **how)
    store = "launcher" if how["agent_store"] else "rank 0"
    hosts = "a host for each" if how["apart"] else "one host"
    case.strike(f"rank {victim}, {moment}, store of {store}, {hosts}", outcome)
    return save, outcome, victim


def _death(case: Case, action, *phases: str, **how) -> None:
    save, outcome, victim = _strike(case, action, *phases, **how)
    ended_in_time(case, outcome)
    all_failed(case, outcome)
    first_line(case, outcome, names_rank(victim))
    resumes(case, save, outcome)


def kill(case: Case) -> None:
    _death(case, actions.kill, *ANY)


def kill_in_save(case: Case) -> None:
    _death(case, actions.kill, "save")


def terminate(case: Case) -> None:
    _death(case, actions.terminate, *ANY)


def cut_off(case: Case) -> None:
    _death(case, actions.cut_off, *ANY[1:])  # at the start a rank has no connection


def stop(case: Case) -> None:
    save, outcome, victim = _strike(case, actions.stop, *ANY, timeout=PATIENCE)
    ended_in_time(case, outcome, PATIENCE + SECONDS)
    all_failed(case, outcome)
    first_line(case, outcome, names_rank(victim))
    resumes(case, save, outcome)


def go_silent(case: Case) -> None:
    """All packets of a rank on a host of its own are lost: it ends by itself, because no other rank can reach it."""
    save, outcome, victim = _strike(case, actions.go_silent, *ANY, timeout=PATIENCE, apart=True)
    ended_in_time(case, outcome, PATIENCE + SECONDS)
    all_failed(case, outcome)
    first_line(case, outcome, names_rank(victim))
    resumes(case, save, outcome)


def end_while_joining(case: Case) -> None:
    """A rank dies or stops before the job, during the rendezvous, or while groups are made."""
    name, action = case.random.choice(
        (("killed", actions.kill), ("stopped", actions.stop), ("ended", actions.terminate))
    )
    moment, victim = Moment("join", 0, case.random.randrange(JOINS)), case.random.randrange(case.ranks)
    how = {"agent_store": case.random.random() < 0.5, "apart": case.random.random() < 0.5}
    fault, save = Fault(moment, victim, action), case.bench.fresh(case.layout)
    outcome = case.bench.run(case.layout, save, fault=fault, timeout=PATIENCE, **how)
    case.strike(f"rank {victim} {name}, {moment}, {how}", outcome)
    ended_in_time(case, outcome, PATIENCE + SECONDS)
    all_failed(case, outcome)
    first_line(case, outcome, rf"rank {victim} (did not join|died|stopped|ended|was ended|on host\d died)")
    resumes(case, save, outcome)


def drop_watch(case: Case) -> None:
    """A network drops the connections of a rank's watch, and no others: nothing else happens."""
    moment, victim = case.draw_moment(*COMPUTING, "data", "save")
    how = {"agent_store": case.random.random() < 0.5, "apart": case.random.random() < 0.5}
    fault, save = Fault(moment, victim, actions.drop_watch), case.bench.fresh(case.layout)
    outcome = case.bench.run(case.layout, save, fault=fault, **how)
    case.strike(f"rank {victim}, {moment}, {how}", outcome)
    all_well(case, outcome)
    few_lines(case, outcome, 0)
    case.expect(LOST, losses(save) == case.reference.losses, "it has other losses")


def join_late(case: Case) -> None:
    """A rank that starts seconds after the others is waited for."""
    victim, save = case.random.randrange(case.ranks), case.bench.fresh(case.layout)
    fault = Fault(Moment("join"), victim, partial(time.sleep, LATE))
    outcome = case.bench.run(case.layout, save, fault=fault, agent_store=case.random.random() < 0.5)
    case.strike(f"rank {victim}, {LATE} s late", outcome)
    all_well(case, outcome)
    few_lines(case, outcome, 0)
    case.expect(LOST, losses(save) == case.reference.losses, "it has other losses")


def kill_launcher(case: Case) -> None:
    save, outcome, _ = _strike(case, actions.kill_launcher, *ANY, agent_store=True)
    ended_in_time(case, outcome)
    all_failed(case, outcome)
    resumes(case, save, outcome)


def kill_beside_save(case: Case) -> None:
    """A fault with --async-save between two saves, when the files of the first may be written or not."""
    _death(case, actions.kill, *COMPUTING, "save", more="--async-save", first=3)


def kill_helper(case: Case) -> None:
    """A process that reads data for a rank dies."""
    save = case.bench.fresh(case.layout)
    fault = Fault(Moment("helper", 1, case.random.randrange(6)), 0, actions.kill)
    outcome = case.bench.run(case.layout, save, fault=fault, more="--num-workers 1")
    case.strike(f"data loader of rank 0, {fault.moment}", outcome)
    ended_in_time(case, outcome)
    all_failed(case, outcome)
    first_line(case, outcome, names_rank(0))
    resumes(case, save, outcome)


def fail(case: Case) -> None:
    save, outcome, victim = _strike(case, actions.fail, *COMPUTING, "data")
    ended_in_time(case, outcome)
    all_failed(case, outcome)
    first_line(case, outcome, names_rank(victim), "injected")
    resumes(case, save, outcome)


def interrupt(case: Case) -> None:
    """Ctrl-C reaches all ranks. The job prints one line, or none if nothing has started."""
    save, outcome, _ = _strike(case, actions.interrupt_all, *ANY)
    ended_in_time(case, outcome)
    all_failed(case, outcome)
    few_lines(case, outcome, 1)
    resumes(case, save, outcome)


def leave_at_sigterm(case: Case) -> None:
    """With --exit-signal-handler the job saves and exits with status 0. A resumed run repeats no iteration."""
    flag = "--exit-signal-handler"
    save, outcome, _ = _strike(case, actions.terminate, *(phase for phase in ANY if phase != "start-up"), more=flag)
    all_well(case, outcome)
    few_lines(case, outcome)
    done = [record["iteration"] for record in losses(save)]
    tracker = int((save / "latest_checkpointed_iteration.txt").read_text())
    case.expect(LOST, tracker == max(done), f"did {max(done)} iterations and saved {tracker}")
    resumes(case, save, outcome, flag)


def nan_gradient(case: Case) -> None:
    save, outcome, victim = _strike(case, actions.nan_gradient, "forward")
    ended_in_time(case, outcome)
    all_failed(case, outcome)
    # Every rank knows it and stops; any of them may print the line.
    first_line(case, outcome, rf"{_of_any_stage(actions.SPOILT)} is nan on rank {victim}\b", "iteration")
    resumes(case, save, outcome)


def _of_any_stage(parameter: str) -> str:
    """A regular expression for the name of a parameter, whose layer is counted from the first of its stage."""
    return re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(parameter))


def bad_token(case: Case) -> None:
    token = case.random.choice((257, 263, 300, 10**6, -1))
    save, outcome, _ = _strike(case, partial(actions.bad_token, token), "data", ends_others=True)
    case.what += f", token {token}"
    ended_in_time(case, outcome)
    all_failed(case, outcome)
    first_line(case, outcome, rf"token {token}\b")
    resumes(case, save, outcome)


# --------------------------------------------------------------------------------------------------- storage


@contextmanager
def _small_disk(directory: Path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def disk_full(case: Case) -> None:
    moment, victim = case.draw_moment("save", "forward")
    disk = case.bench.fresh(f"{case.layout} disk")
    with _small_disk(disk):
        save = disk / "save"
        action = partial(actions.fill_disk, disk)
        outcome = case.bench.run(case.layout, save, fault=Fault(moment, victim, action), ends_others=True)
        case.strike(f"disk full at {moment} of rank {victim}", outcome)
        all_failed(case, outcome)
        case.expect(WITHIN, not outcome.late and not outcome.left, f"late {outcome.late}, left {outcome.left}")
        _tells_of(case, outcome, r"No space left|no room", save)
        (disk / actions.BALLAST).unlink()
        resumes(case, save, outcome)


def directory_gone(case: Case) -> None:
    moment, victim = case.draw_moment("save", "forward")
    save = case.bench.fresh(case.layout)
    fault = Fault(moment, victim, partial(actions.move_away, save))
    outcome = case.bench.run(case.layout, save, fault=fault, ends_others=True)
    case.strike(f"--save vanishes at {moment} of rank {victim}", outcome)
    all_failed(case, outcome)
    case.expect(WITHIN, not outcome.late and not outcome.left, f"late {outcome.late}, left {outcome.left}")
    _tells_of(case, outcome, r"No such file or directory|removed or unmounted", save)
    gone = Path(f"{save}.gone")
    if save.exists():
        save.rename(f"{save}.new")
    gone.rename(save)
    resumes(case, save, outcome)


def read_only(case: Case) -> None:
    moment, victim = case.draw_moment("save", "forward")
    save = case.bench.fresh(case.layout)
    fault = Fault(moment, victim, partial(actions.make_read_only, save))
    try:
        outcome = case.bench.run(case.layout, save, fault=fault, ends_others=True)
    finally:
        with suppress(subprocess.CalledProcessError):
            subprocess.run(["umount", "-l", str(save)], check=True, stderr=subprocess.DEVNULL)
    case.strike(f"--save read-only at {moment} of rank {victim}", outcome)
    all_failed(case, outcome)
    case.expect(WITHIN, not outcome.late and not outcome.left, f"late {outcome.late}, left {outcome.left}")
    _tells_of(case, outcome, r"Read-only file system|read-only", save)
    resumes(case, save, outcome)


def _tells_of(case: Case, outcome: Outcome, cause: str, path: Path) -> None:
    """A line after the fault names cause and path; there are few lines."""
    told = any(re.search(cause, line.text) and str(path) in line.text for line in outcome.after)
    case.expect(NAMED, told, f"no line with {cause} and {path}: {[line.text[:200] for line in outcome.after[:3]]}")
    few_lines(case, outcome)


def second_job(case: Case) -> None:
    """Another job with the same --save is refused before it changes a file; the first continues."""
    moment, victim = case.draw_moment("forward", "optimizer", "save")
    save = case.bench.fresh(case.layout)
    second: list[Outcome] = []

    def start_another() -> None:
        second.append(case.bench.run(case.layout, save, ends_others=True, limit=30))

    outcome = case.bench.run(
        case.layout, save, fault=Fault(moment, victim, wait_for_go), meanwhile=start_another, limit=90
    )
    case.strike(f"second job on --save at {moment} of rank {victim}", outcome)
    all_well(case, outcome)
    case.expect(LOST, losses(save) == case.reference.losses, "the first job has other losses")
    if second:
        case.expect(DETECTED, second[0].statuses.get(0) == 2, f"the second has exit statuses {second[0].statuses}")
        lines = [line.text for line in second[0].after]
        told = len(lines) == 1 and str(save) in lines[0] and re.search(r"process \d+|pid \d+", lines[0])
        case.expect(NAMED, told, f"{len(lines)} lines, the first: {lines[:1]}")
