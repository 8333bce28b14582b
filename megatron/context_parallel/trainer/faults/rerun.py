"""Repeats a suspicious step, to distinguish hardware faults from errors in the program.

megatron-core's rerun state machine makes the decisions. This module gives it the values and reports the decisions.
The machine's own messages are off: they count iterations from the start of the process, and every rank prints them.
"""

import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, RerunState, RerunStateMachine
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron.context_parallel.runtime.comm.first_rank import of_all_ranks
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.data.batches import Batch

from .findings import Findings, Kind

Batches: TypeAlias = Iterator[Batch] | RerunDataIterator


class StepRejectedError(Exception):
    """A step must not be applied: `status` is the exit status, `save` says whether to save the iteration before it."""

    def __init__(self, line: str, status: int, save: bool) -> None:
        super().__init__(line)
        self.status, self.save = status, save


def start_machine(args: Arguments) -> RerunStateMachine:
    """megatron-core's state machine in this process, in the mode of `--rerun-mode`."""
    logging.getLogger(rerun_state_machine.__name__).setLevel(logging.CRITICAL)
    tracker = get_cuda_rng_tracker()
    rerun_state_machine.destroy_rerun_state_machine()
    rerun_state_machine.initialize_rerun_state_machine(
        mode=RerunMode(args.rerun_mode),
        state_save_func=tracker.get_states,
        state_restore_func=tracker.set_states,
    )
    return rerun_state_machine.get_rerun_state_machine()


def replayable(args: Arguments, batches: Iterator[Batch]) -> Batches:
    """`batches`, wrapped so that `--rerun-mode` can repeat the batches of a step."""
    return batches if args.rerun_mode == RerunMode.DISABLED else RerunDataIterator(batches)


def passes(findings: Findings, batches: list[Batches]) -> Iterator[None]:
    """Yields once for each pass over the step: a second time if the first pass has findings."""
    machine = findings.machine
    findings.passes = 0
    if machine.state is RerunState.NOT_RUNNING_YET:
        machine.failed_validation_call = None  # left by a spike in an earlier step; the machine would compare it again
    while machine.should_run_forward_backward(batches):
        yield
        findings.passes += 1
        if machine.state is RerunState.INITIAL_RUN:
            findings.note_numbers()
        if machine.mode is not RerunMode.DISABLED:
            _validate(findings)


def _validate(findings: Findings) -> None:
    kinds = {finding.kind for finding in findings.found}
    validate = findings.machine.validate_result
    wrong, spiky = bool(kinds & {Kind.LOSS, Kind.GRADIENT}), Kind.SPIKE in kinds
    validate(findings.values, lambda _: wrong, "not finite", comparison_func=_differ_where_not_finite)
    validate(findings.values, lambda _: spiky, "spiky loss", comparison_func=_differ_in_losses, fatal=False)


def _differ_where_not_finite(before: dict[str, float], now: dict[str, float]) -> float:
    return 0.0 if all(_same(before[name], now[name]) for name in _not_finite(before)) else math.inf


def _differ_in_losses(before: dict[str, float], now: dict[str, float]) -> float:
    return 0.0 if all(_same(before[name], now[name]) for name in before if name.startswith("loss")) else math.inf


def _not_finite(values: dict[str, float]) -> list[str]:
    return [name for name, value in values.items() if not math.isfinite(value)]


def _same(before: float, now: float) -> bool:
    return before == now or (math.isnan(before) and math.isnan(now))


# ------------------------------------------------------------------------------------------------ the verdict


@dataclass(frozen=True)
class Case:
    """A suspicious value of a rank, and its value in the repeated step."""

    rank: int
    name: str
    before: float
    now: float
    before_on: str
    now_on: str

    @property
    def text(self) -> str:
        """Both values, and their devices."""
        again = "the same" if _same(self.before, self.now) else f"{self.now:.6f}"
        return f"{self.name} was {self.before:.6f} on rank {self.rank} ({self.before_on}); repeated, it is {again}"


_VERDICTS = {  # by the state of the machine after a step
    RerunState.NOT_RUNNING_YET: "training continues",
    RerunState.RERUNNING_IN_PLACE: "likely a transient fault, on that rank or on one that it received data from",
    RerunState.WILL_RERUN_FROM_CHECKPOINT: "restart with --load on other devices, to repeat the step there",
    RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT: "that is the same device; restart with --load on other devices",
}
# megatron-core saves after a transient fault only until 0.18. The weights did not change, so we always do.
_SAVED_BEFORE_LEAVING = (RerunState.RERUNNING_IN_PLACE, RerunState.WILL_RERUN_FROM_CHECKPOINT)


def settle(findings: Findings, iteration: int) -> list[str]:
    """A line about a step that was repeated and will be applied. All ranks call it after the passes of a step.

    Raises:
        StepRejectedError: the step must not be applied.
    """
    machine = findings.machine
    _, leave, status = machine.should_checkpoint_and_exit()
    if findings.passes == 1 and not leave:
        return []
    cases: list[Case] = [case for case in of_all_ranks(_case(findings)) if case is not None]
    case = cases[0]
    others = ", ".join(str(other.rank) for other in cases[1:])
    verdict = _VERDICTS.get(machine.state)
    if verdict is None:  # repeated on another device, from the checkpoint
        same = _same(case.before, case.now)
        verdict = f"on {case.now_on}: likely a fault of the data, the settings or the program"
        if not same:
            verdict = f"on {case.now_on}: {case.before_on} is likely to be faulty"
    line = f"iteration {iteration}: {case.text}{' (likewise on ranks ' + others + ')' if others else ''}; {verdict}"
    if leave:
        raise StepRejectedError(f"{line} (status {status})", status, machine.state in _SAVED_BEFORE_LEAVING)
    return [line]


def _case(findings: Findings) -> Case | None:
    """The suspicious value of this rank, if it requested the second pass, in this process or before the checkpoint."""
    machine = findings.machine
    if not machine.rerun_requested:
        return None
    before: dict[str, Any] = machine.initial_result
    losses = {name: value for name, value in before.items() if name.startswith("loss")}
    name = (_not_finite(before) or sorted(losses, key=lambda name: -losses[name]))[0]
    here = f"host {os.uname()[1]}, device {torch.cuda.current_device()}"
    before_on = here
    if machine.suspicious_node:  # recorded when the step was to be repeated on another device
        before_on = f"host {machine.suspicious_node}, device {machine.suspicious_device}"
    return Case(dist.get_rank(), name, before[name], findings.values[name], before_on, here)
