"""A whole run of the trainer on ranks that are there already, and what its log says."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.context_parallel.trainer import training
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.checkpoint.save_load import Save
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.log import RunLog
from tests.support.training_case import build, forget_graphs, groups

PRODUCTS = torch.ops.aten.mm.default, torch.ops.aten.bmm.default
NUMBERS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Run:
    """What a rank saw of a run.

    Attributes:
        losses, norms, flops: of each iteration.
        evaluations: iteration, split and loss of each.
        records: the lines of `metrics.jsonl`; rank 0 alone has them.
        vocabulary: rows of the embedding.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    flops: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, str, float]] = field(default_factory=list)
    records: list[dict] = field(default_factory=list)
    vocabulary: int = 0


class _Recorded(RunLog):
    """The log of a run, which is kept too."""

    run: Run

    def iteration_done(self, progress, loss, lr, grad_norm, flops, seconds) -> None:
        self.run.losses.append(loss)
        self.run.norms.append(grad_norm)
        self.run.flops.append(flops)
        super().iteration_done(progress, loss, lr, grad_norm, flops, seconds)

    def evaluation_done(self, iteration, split, loss) -> None:
        self.run.evaluations.append((iteration, split, loss))
        super().evaluation_done(iteration, split, loss)

    def _publish(self, numbers) -> None:
        self.run.records.append(numbers)
        super()._publish(numbers)


class SummedInParts(TorchDispatchMode):
    """Matrix products are sums of several, each rounded: as those of ranks that share the work."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function not in PRODUCTS:
            return function(*args, **(kwargs or {}))
        lefts, rights = args[0].tensor_split(self.parts, -1), args[1].tensor_split(self.parts, -2)
        total = function(lefts[0], rights[0])
        for left, right in zip(lefts[1:], rights[1:], strict=True):
            total = total + function(left, right)
        return total


def read_args(flags: str, numbers: str) -> Arguments:
    """The arguments of a command line, in fp16 too, which the trainer refuses without a GPU."""
    args = parse_args(flags.split() + ["--bf16"] * (numbers != "float32"))
    dtype = NUMBERS[numbers]
    return replace(args, tensorboard_dir=None, params_dtype=dtype, fp16=numbers == "fp16", bf16=numbers == "bf16")


def save_start(flags: str, numbers: str, folder: str) -> None:
    """Saves first weights in `folder`."""
    with contextlib.redirect_stdout(open(os.devnull, "w")):
        args = replace(read_args(flags, numbers), save=folder)
        os.mkdir(folder)
        with groups(args):
            Save(args, build(args)).finish()


def train(flags: str, numbers: str, parts: int = 1) -> Run:
    """Trains from a command line. With `parts`, matrix products are summed in so many parts."""
    run, states = Run(), []
    build_state = training.build_state

    def built(*given):
        states.append(build_state(*given))
        return states[0]

    changes = {"distributed_job": _in_place, "save_lock": _folder, "build_state": built}
    with (
        contextlib.redirect_stdout(open(os.devnull, "w")),
        mock.patch.multiple(training, RunLog=type("", (_Recorded,), {"run": run}), **changes),
        SummedInParts(parts) if parts > 1 else contextlib.nullcontext(),
    ):
        args = read_args(f"{flags} --log-interval 1", numbers)
        training.pretrain(args)
    forget_graphs(states[0].model)
    run.vocabulary = args.padded_vocab_size
    return run


@contextlib.contextmanager
def _in_place(args: Arguments, progress=None) -> Iterator[None]:
    """A job in the world that is there."""
    with groups(args):
        yield


@contextlib.contextmanager
def _folder(args: Arguments) -> Iterator[None]:
    """The folder that a lock makes. A lock would stay after a refusal, with which a real process ends."""
    if args.save:
        os.makedirs(args.save, exist_ok=True)
    yield
