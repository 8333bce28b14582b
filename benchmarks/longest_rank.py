"""The code of each rank of longest.py: a training step with a limit of its memory."""

import ctypes
import os
import resource
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple, NoReturn
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.memory_rank import SHORT, resident, two_steps
from benchmarks.training_rank import random_batches
from megatron.context_parallel.cli.run_main import ignore_warnings_of_libraries
from megatron.context_parallel.kernels import aten
from megatron.context_parallel.trainer import setup, training
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.checkpoint.train_state import Progress
from megatron.context_parallel.trainer.memory_report import lacks_memory

NO_MEMORY = 3  # exit status
SECONDS_TO_END = 3


class Trial(NamedTuple):
    """A step to train.

    Attributes:
        flags: of the trainer, without the length.
        room: bytes above the start.
        computes: attention computes; otherwise it returns zeros.
        store: the file in which the ranks meet.
    """

    flags: list[str]
    tokens: int
    room: int
    computes: bool
    ranks: int
    store: str


def train(rank: int, trial: Trial) -> NoReturn:
    """The life of a rank. Its exit status is 0, or `NO_MEMORY`, or 1 after another error, which is printed."""
    status = 1
    try:
        step_within_limit(rank, trial)
        status = 0
    except BaseException as error:
        if lacks_memory(error):
            status = NO_MEMORY
        else:
            time.sleep(SECONDS_TO_END)  # if it is about another rank, that one ends first, and this one with it
            traceback.print_exc()
    os._exit(status)


def step_within_limit(rank: int, trial: Trial) -> None:
    torch.set_num_threads(1)
    ignore_warnings_of_libraries()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(trial.ranks))
    dist.init_process_group("gloo", init_method=f"file://{trial.store}", rank=rank, world_size=trial.ranks)
    args = replace(parse_args(trial.flags), seq_length=trial.tokens, max_position_embeddings=trial.tokens)
    short = replace(args, seq_length=SHORT * trial.ranks)
    setup.initialize_model_parallel(args)
    with nullcontext() if trial.computes else attention_of_zeros():
        two_steps(short)  # loads code and starts threads
        ctypes.CDLL(None).malloc_trim(0)
        most = resident("VmData") + trial.room
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        state = training.build_state(args, Progress())
        training.train_step(short, state, [random_batches(short)], time.monotonic())  # makes Adam's numbers
        training.train_step(args, state, [random_batches(args)], time.monotonic())
    dist.barrier()


@contextmanager
def attention_of_zeros() -> Iterator[None]:
    """Inside, the CPU kernel allocates what it returns, and fills it with zeros."""
    with patch.object(aten, "cpu_attention", _forward), patch.object(aten, "cpu_attention_backward", _backward):
        yield


def _forward(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return _rows_first(q), q.new_zeros(q.shape[:-1])


def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
    return _rows_first(q), _rows_first(k), _rows_first(v)


def _rows_first(x: Tensor) -> Tensor:
    """Zeros like `x` [b, heads, s, d], in the order [b, s, heads, d] as ATen's results."""
    b, heads, s, d = x.shape
    return x.new_zeros(b, s, heads, d).transpose(1, 2)
