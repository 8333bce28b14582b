"""A rank dies or stops, in every phase, the first or the last, in each kind of group: the first line names it."""

import pytest

from . import actions
from .bench import Bench
from .job import Outcome
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
    """The job broke, said so in one line, and left nothing."""
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
