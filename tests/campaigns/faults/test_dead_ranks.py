"""A rank dies or stops, in every phase, the first or the last, in each kind of group: the first line names it."""

import os
import subprocess

import pytest

from megatron.context_parallel.trainer.faults import monitor
from tools.netlab import Lab

from . import actions
from .bench import Bench
from .job import Outcome, run_job, wait_for_go
from .moments import Fault, Moment

MOMENTS = (  # layout, moment, victim, where the line says that it was
    ("ring cp4", Moment("forward", 2, 2), 0, "iteration 2, layer 1, forward of ring, step 1"),
    ("mesh cp4", Moment("forward", 2, 2), 2, "iteration 2, layer 1, forward of mesh, step "),
    ("attention2d cp4", Moment("backward", 3, 1), 3, "iteration 3, layer 2, backward of attention2d, step "),
    ("ulysses cp4", Moment("forward", 2, 1), 1, "iteration 2, layer 1, forward of ulysses"),
    ("allgather cp4", Moment("backward", 2, 1), 3, "iteration 2, layer "),
    ("cp2 tp2", Moment("optimizer", 2), 1, "iteration 2, optimizer"),
    ("cp2 tp2", Moment("data", 2), 3, "iteration 2, data"),
    ("cp2 pp2", Moment("forward", 2, 1), 3, "iteration 2, layer 2, forward of ring, step 0"),
    ("cp2 pp2", Moment("backward", 2, 1), 0, "iteration 2, layer 1, backward of ring"),
    ("cp2 dp2", Moment("optimizer", 3, 1), 2, "iteration 3, optimizer"),
    ("cp2 dp2", Moment("save", 2, 1), 0, "iteration 2, save"),
    ("cp2", Moment("evaluation", 3, 1), 0, "iteration 3, evaluation"),
)


def named(outcome: Outcome, words: str) -> None:
    """The job failed with one line and left no process behind."""
    assert [line.text.startswith(words) for line in outcome.after] == [True], outcome.text
    assert 0 not in outcome.statuses.values() and not outcome.late and not outcome.left


@pytest.mark.parametrize(("layout", "moment", "victim", "where"), MOMENTS)
def test_a_dead_rank_is_named(bench: Bench, layout, moment, victim, where):
    save = bench.fresh(f"{layout} killed")
    outcome = bench.run(layout, save, fault=Fault(moment, victim, actions.kill), agent_store=False)
    named(outcome, f"rank {victim} died at {where}")
    assert outcome.seconds < 10
    assert len(list(save.glob("crash/rank-*.log"))) == len(outcome.statuses)


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_stopped_rank_is_named_and_killed(bench: Bench, victim):
    fault = Fault(Moment("backward", 3, 1), victim, actions.stop)
    more = "--distributed-timeout-seconds-after-init 5"
    outcome = bench.run("mesh cp4", fault=fault, agent_store=False, more=more)
    named(outcome, f"rank {victim} stopped responding at iteration 3, layer 2, backward of mesh, step ")
    assert not outcome.stopped  # the others killed it


@pytest.mark.parametrize("victim", [0, 2])
def test_the_error_of_a_rank_is_its_own(bench: Bench, victim):
    outcome = bench.run("ring cp4", fault=Fault(Moment("forward", 2, 1), victim, actions.fail), agent_store=False)
    named(outcome, f"rank {victim}: RuntimeError: injected; details in ")


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_a_signal_ends_is_named(bench: Bench, victim):
    outcome = bench.run("cp2 tp2", fault=Fault(Moment("optimizer", 2), victim, actions.terminate), agent_store=False)
    named(outcome, f"rank {victim} was ended by SIGTERM at iteration ")


def test_ctrl_c_is_no_fault(bench: Bench):
    outcome = bench.run("cp2", fault=Fault(Moment("forward", 2), 1, actions.interrupt_all), agent_store=False)
    assert [line.text.startswith("interrupted at iteration 1") for line in outcome.after] == [True], outcome.text


def test_a_rank_that_does_not_move_is_named(bench: Bench):
    fault = Fault(Moment("data", 3), 1, lambda: [actions.time.sleep(1) for _ in range(100)])
    outcome = bench.run("cp2 tp2", fault=fault, agent_store=False, more="--distributed-timeout-seconds-after-init 5")
    named(outcome, "rank 1 makes no progress at iteration 3, data, in ")


@pytest.mark.parametrize(
    ("layout", "nth", "victim", "agent_store", "words"),
    [  # at once if it was there, and after the time limit if it was not
        ("cp2 tp2", 4, 2, False, "rank 2 died at joining"),
        ("cp2", 4, 0, True, "rank 0 died at joining"),
        ("cp2", 0, 1, False, "rank 1 did not join within --distributed-timeout-minutes 0.05:"),
        ("cp2", 0, 0, False, "rank 1: error: rank 0 did not join within --distributed-timeout-minutes 0.05:"),
    ],
)
def test_a_rank_that_dies_while_ranks_join_is_named(bench: Bench, layout, nth, victim, agent_store, words):
    late = {} if "died" in words else {"timeout": 3}
    fault = Fault(Moment("join", 0, nth), victim, actions.kill)
    named(bench.run(layout, fault=fault, agent_store=agent_store, **late), words)


def test_a_first_rank_that_dies_with_the_store_while_ranks_join_is_named(bench: Bench):
    def kill_when_others_are_connected():
        actions.time.sleep(1)
        actions.kill()

    fault = Fault(Moment("join", 0, 2), 0, kill_when_others_are_connected)
    outcome = bench.run("cp2", fault=fault, agent_store=False)
    line = outcome.after[-1].text  # after what torch prints
    assert line.startswith("rank 1: error: rank 0 ended before all ranks had joined"), outcome.text
    assert 0 not in outcome.statuses.values() and not outcome.late and not outcome.left


def test_a_late_rank_is_waited_for_and_named(bench: Bench, monkeypatch):
    monkeypatch.setattr(monitor, "SECONDS_OF_PATIENCE", 1)
    fault = Fault(Moment("join"), 1, lambda: actions.time.sleep(2))
    outcome = bench.run("cp2", fault=fault)
    assert set(outcome.statuses.values()) == {0}, outcome.text
    (line,) = [line.text for line in outcome.after]
    assert line == "rank 1 of 2 not joined after 1 s; waiting up to --distributed-timeout-minutes 1"


def test_a_first_rank_whose_packets_are_lost_is_named_and_ends(bench: Bench):
    fault = Fault(Moment("forward", 3), 0, actions.go_silent)
    more = "--distributed-timeout-seconds-after-init 4"
    outcome = bench.run("ring cp4", fault=fault, agent_store=False, apart=True, more=more)
    assert all(outcome.statuses.values()) and not outcome.late and not outcome.left, outcome.text
    assert all("rank 0 " in line.text for line in outcome.after) and outcome.after, outcome.text


def test_a_host_that_is_cut_off_ends_too(bench: Bench):
    """Hosts in namespaces of their own. The switch drops the port of one host without a notice to anyone."""
    if os.geteuid() or subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("needs root and the right to make namespaces")
    more = "--context-parallel-size 3 --seq-length 96 --distributed-timeout-seconds-after-init 4"
    with Lab(3, 1, name=f"faults{os.getpid()}") as lab:
        cut = ["ip", "-n", lab.switch, "link", "set", "port2", "nomaster"]
        outcome = run_job(
            bench.flags("cp2", more=more),
            3,
            Fault(Moment("forward", 3), 2, wait_for_go),
            agent_store=False,
            lab=lab,
            meanwhile=lambda: subprocess.run(cut, check=True),
        )
    assert set(outcome.statuses) == {0, 1, 2} and all(outcome.statuses.values()) and not outcome.late, outcome.text
    told = {line.rank: line.text for line in outcome.after}
    assert told[0].startswith("rank 2 stopped responding at "), outcome.text
    assert told[2].startswith(f"rank 2 on {lab.hosts[2]} is cut off: it received nothing from ranks 0, 1 for 4 s")
