"""The harness itself: faults happen at the given moment and rank, and the outcome is recorded."""

import atexit
import os
import signal
import time

import _pytest.pathlib

from . import actions, campaign
from .bench import Bench, losses
from .job import run_job, wait_for_go
from .moments import Fault, Moment


def test_a_killed_rank_and_the_resumed_run(bench: Bench):
    undisturbed = bench.reference("cp2")
    save = bench.fresh("killed")
    outcome = bench.run("cp2", save, fault=Fault(Moment("forward", 3, 1), 1, actions.kill))
    assert outcome.statuses[1] == -signal.SIGKILL
    assert outcome.fired and outcome.statuses[0] != 0 and not outcome.late and not outcome.left
    assert [record["iteration"] for record in losses(save)] == [1, 2]
    resumed = bench.run("cp2", save)
    assert set(resumed.statuses.values()) == {0}
    assert any("resuming after iteration 2" in line.text for line in resumed.lines)
    assert losses(save) == undisturbed.losses


def test_all_phases_have_events(bench: Bench):
    phases = {phase for phase, _ in bench.reference("cp2").events[0]}
    assert phases >= {"start-up", "load", "data", "forward", "backward", "optimizer", "evaluation", "save"}


def test_a_stopped_rank_is_told_from_one_that_died():
    outcome = run_job([], 1, main=lambda argv: os.kill(os.getpid(), signal.SIGSTOP))
    assert outcome.stopped == {0} and outcome.statuses == {0: -signal.SIGKILL} and not outcome.late


def test_meanwhile_runs_while_the_victim_waits(bench: Bench):
    came = []
    fault = Fault(Moment("optimizer", 2), 0, wait_for_go)
    outcome = bench.run("cp2", fault=fault, meanwhile=lambda: came.append(time.monotonic()))
    assert set(outcome.statuses.values()) == {0}, outcome.text
    assert outcome.fired < came[0] < outcome.ends[0]


def test_what_outlives_its_rank_is_found_and_killed():
    outcome = run_job(["--save", "/nowhere"], 1, main=_leave_a_child_behind)
    assert outcome.statuses == {0: 3}
    assert len(outcome.left) == 1 and "child" in outcome.left[0]
    assert [line.text for line in outcome.lines] == ["started"]


def _leave_a_child_behind(argv: list[str]) -> int:
    if not os.fork():
        time.sleep(1000)
    print("started", flush=True)
    return 3


def test_a_job_that_hangs_is_ended():
    outcome = run_job([], 2, main=lambda argv: time.sleep(1000), limit=1)
    assert outcome.late == {0, 1}


def test_a_job_does_not_tidy_up_behind_pytest(monkeypatch, tmp_path):
    """That took a launcher longer than it may outlive its ranks."""
    monkeypatch.setattr(_pytest.pathlib, "cleanup_numbered_dir", (tmp_path / "tidied").touch)
    atexit.register(_pytest.pathlib.cleanup_numbered_dir)
    try:
        assert run_job([], 1, main=lambda argv: None).statuses == {0: 0}
    finally:
        atexit.unregister(_pytest.pathlib.cleanup_numbered_dir)
    assert not (tmp_path / "tidied").exists()


def test_a_campaign_goes_on_where_it_was_ended(bench: Bench, monkeypatch, tmp_path, capfd):
    def fake(case) -> None:
        os.write(1, f"injects {case.number}\n".encode())  # one write: two processes print at once
        case.injected = True

    monkeypatch.setattr(campaign, "KINDS", {fake: 1})
    options = ["--seed", "3", "--processes", "2", "--results", str(tmp_path / "results.jsonl")]
    assert campaign.main(["--count", "3", *options]) == 0
    assert sorted(line for line in capfd.readouterr().out.splitlines() if "injects" in line) == [
        "injects 0",
        "injects 1",
        "injects 2",
    ]
    assert campaign.main(["--count", "4", *options]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if "injects" in line] == ["injects 3"]
    assert [line.split() for line in lines if line.startswith("all")] == [["all", "4", "4", "4", "4", "0"]]
