"""When a fault happens: hooks in a rank count its events, so that no clock decides.

A rank is in one phase at a time, and each phase has countable events:

    join        before the job, at its store, at the watch, and around the first process group
    start-up    building datasets, model and optimizer
    load        restoring a checkpoint; its files
    data        reading a sample
    forward     launching communication of the attention in the forward pass
    backward    the same in the backward pass
    optimizer   before the update, and after it
    evaluation  like forward, in an evaluation
    save        each file or directory of `--save` that is touched while a checkpoint is saved
    helper      a sample that a process reads which a rank started; its iteration is that of its start
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path

from megatron.core import dist_checkpointing
from megatron.core.datasets.gpt_dataset import GPTDataset
from torch.distributed import distributed_c10d

from megatron.context_parallel.runtime.comm import transport
from megatron.context_parallel.trainer import setup, training
from megatron.context_parallel.trainer.arguments import complete as arguments
from megatron.context_parallel.trainer.checkpoint.train_state import TrainState
from megatron.context_parallel.trainer.faults import monitor, rank_file, watch


@dataclass(frozen=True)
class Moment:
    """The `nth` event (from 0) of a phase at an iteration (from 1; 0: before the first)."""

    phase: str
    iteration: int = 0
    nth: int = 0

    def __str__(self) -> str:
        return f"{self.phase} {self.nth} of iteration {self.iteration}"


@dataclass(frozen=True)
class Fault:
    """`action()` in the process of rank `victim` at a moment."""

    moment: Moment
    victim: int
    action: Callable[[], None]


class Watch:
    """Counts the events of this rank and lets the fault happen at its moment."""

    def __init__(self, rank: int, fault: Fault | None, tell: Callable[[str], None]) -> None:
        self.fault = fault if fault and fault.victim == rank else None
        self.rank, self.tell = rank, tell
        self.phase, self.iteration, self.save = "start-up", 0, ""
        self.counts: Counter[tuple[str, int]] = Counter()
        self.process = os.getpid()
        self.state: TrainState | None = None  # from the first iteration on
        self.spoil: Callable[[dict], dict] | None = None  # changes one sample

    def event(self, *phases: str) -> None:
        """One event, if the rank is in one of these phases."""
        helper = os.getpid() != self.process
        phase = "helper" if helper else self.phase
        if not helper and phase not in phases:
            return
        moment = Moment(phase, self.iteration, self.counts[phase, self.iteration])
        self.counts[phase, self.iteration] += 1
        if self.fault and self.fault.moment == moment:
            action, self.fault = self.fault.action, None
            self.tell(f"fired {time.monotonic()}")
            action()

    def within(self, phase: str, function: Callable, count: bool = True) -> Callable:
        """`function` as a phase, whose beginning is its first event."""

        @wraps(function)
        def run(*args, **kwargs):
            outer, self.phase = self.phase, phase
            if count:
                self.event(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self.phase = outer

        return run

    def as_event(self, phase: str, function: Callable) -> Callable:
        """`function`, whose beginning is an event of a phase of its own."""

        @wraps(function)
        def run(*args, **kwargs):
            self.within(phase, lambda: None)()
            return function(*args, **kwargs)

        return run

    def before(self, phases: tuple[str, ...], function: Callable) -> Callable:
        """`function` as an event of the phases."""

        @wraps(function)
        def run(*args, **kwargs):
            self.event(*phases)
            return function(*args, **kwargs)

        return run


current: Watch  # of this rank
_JOINING = (  # in this order
    (setup, "open_store"),
    (setup, "Watch"),
    (watch.Watch, "meet"),
    (setup, "join_world"),
    (distributed_c10d, "_new_process_group_helper"),
    (distributed_c10d, "_update_default_pg"),
)


def install(watch: Watch, save: str | None, timeout: float | None, apart: bool) -> None:
    """Hooks for all phases in this process, which never leave it.

    `save` is the directory of checkpoints, `timeout` (seconds) takes the place of --distributed-timeout-minutes.
    `apart`: this rank appears to be alone on its host.
    """
    global current
    current = watch
    if timeout is not None:
        parse = arguments.parse_args
        arguments.parse_args = lambda argv: replace(parse(argv), distributed_timeout_minutes=timeout / 60)
    if apart:
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        for module in (rank_file, monitor):
            module.this_host = lambda: f"host{watch.rank} 0"
    for name in ("build_datasets", "build_model", "build_optimizer"):
        setattr(training, name, watch.before(("start-up",), getattr(training, name)))
    training.distributed_job = watch.as_event("join", training.distributed_job)
    for owner, name in _JOINING:
        setattr(owner, name, watch.as_event("join", getattr(owner, name)))
    _count_iterations(watch)
    training.evaluate = watch.within("evaluation", training.evaluate)
    training.run_micro_batches = _unless("evaluation", watch, "backward", training.run_micro_batches)
    training._forward_step = _unless("evaluation", watch, "forward", training._forward_step)
    training.load_checkpoint = watch.within("load", training.load_checkpoint)
    for name in ("start", "finish"):
        setattr(training.Saver, name, watch.within("save", getattr(training.Saver, name)))
    dist_checkpointing.load = watch.before(("load",), dist_checkpointing.load)
    GPTDataset.__getitem__ = watch.within("data", _may_be_spoilt(watch, GPTDataset.__getitem__))
    moving = ("forward", "backward", "evaluation")
    for name in ("exchange", "all_to_all", "all_gather"):
        setattr(transport.TorchTransport, name, watch.before(moving, getattr(transport.TorchTransport, name)))
    if save:
        _count_files(watch, save)


def _unless(other: str, watch: Watch, phase: str, function: Callable) -> Callable:
    inside = watch.within(phase, function, count=phase == "forward")
    return lambda *args, **kwargs: (function if watch.phase == other else inside)(*args, **kwargs)


def _may_be_spoilt(watch: Watch, read: Callable[..., dict]) -> Callable[..., dict]:
    def read_sample(*args) -> dict:
        sample = read(*args)
        if watch.spoil:
            sample, watch.spoil = watch.spoil(sample), None
        return sample

    return read_sample


def _count_iterations(watch: Watch) -> None:
    step = training.train_step

    @wraps(step)
    def train_step(args, state, *rest):
        watch.state, watch.iteration = state, state.progress.iteration + 1
        if "step" not in vars(state.optimizer):
            update = watch.within("optimizer", state.optimizer.step)
            state.optimizer.step = lambda: (update(), watch.within("optimizer", lambda: None)())[0]
        watch.phase = "iteration"
        return step(args, state, *rest)

    training.train_step = train_step


def _count_files(watch: Watch, save: str) -> None:
    def heard(event: str, args: tuple) -> None:
        if event.startswith(("open", "os.", "shutil.")) and any(_is_in(save, arg) for arg in args):
            watch.event("save")

    sys.addaudithook(heard)


def _is_in(directory: str, path: object) -> bool:
    return isinstance(path, str | Path) and str(path).startswith(directory)


def write_counts(watch: Watch, path: Path) -> None:
    """All events as JSON: [[phase, iteration, how many], ...]."""
    path.write_text(json.dumps([[*key, count] for key, count in watch.counts.items()]))
