"""Races of streams on the pretended CUDA device: each is reported, and its mended twin is not.

python -m pytest tests/campaigns/stream_races.py
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

RANKS = 2
RACES: dict[str, Callable[[bool], object]] = {}


def race(function: Callable[[bool], object]) -> Callable[[bool], object]:
    """A function that has a race, unless its argument is true."""
    RACES[function.__name__] = function
    return function


# ------------------------------------------------------------------------------------------------ streams


def _tensor(*shape: int) -> torch.Tensor:
    return torch.ones(*(shape or (8,)), device="cuda")


def _side(waits: bool) -> torch.cuda.Stream:
    """Another stream, which waits for the current one or not."""
    stream = torch.cuda.Stream()
    if waits:
        stream.wait_stream(torch.cuda.current_stream())
    return stream


@race
def read_before_it_is_written(mended: bool) -> None:
    x = _tensor()
    with torch.cuda.stream(_side(mended)):
        x + 1


@race
def written_while_it_is_read(mended: bool) -> None:
    x = _tensor()
    with torch.cuda.stream(side := _side(True)):
        x + 1
    if mended:
        torch.cuda.current_stream().wait_stream(side)
    x.zero_()


@race
def event_too_early(mended: bool) -> None:
    x, event, side = _tensor(), torch.cuda.Event(), torch.cuda.Stream()
    event.record()
    x.add_(1)
    if mended:
        event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        x + 1


@race
def two_heads_of_a_buffer(mended: bool) -> None:
    x = _tensor(4, 3, 2)
    with torch.cuda.stream(side := _side(True)):
        x[:, 0].zero_()
    x[:, 1 if mended else 0 : 2].zero_()
    torch.cuda.current_stream().wait_stream(side)


@race
def launch_of_a_kernel(mended: bool) -> None:
    from megatron.context_parallel.kernels.merge import merge

    out, lse = _tensor(16, 2, 2, 64), _tensor(16, 2, 2)
    others = _tensor(16, 2, 2, 64), _tensor(16, 2, 2)
    with torch.cuda.stream(_side(True)) as _:
        merge(out, lse, *others)
    if mended:
        torch.cuda.synchronize()
    lse + 1


@race
def gradient_of_another_stream(mended: bool) -> None:
    x = _tensor().requires_grad_()
    with torch.cuda.stream(side := _side(True)):
        y = (2 * x).sum()
    torch.cuda.current_stream().wait_stream(side)
    y.backward()  # on the stream of the forward pass; PyTorch makes the current one wait
    with torch.cuda.stream(_side(mended)):
        x.grad + 1


@race
def freed_while_it_is_read(mended: bool) -> None:
    x, side = _tensor(), _side(True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x + 1
    if mended:
        x.record_stream(side)
    del x
    _tensor()


@race
def freed_before_a_wait(mended: bool) -> None:
    x = _tensor()
    with torch.cuda.stream(side := _side(True)):
        x + 1
    del x
    y = torch.empty(8, device="cuda")  # may have the memory of x
    if mended:
        torch.cuda.current_stream().wait_stream(side)
    y.zero_()


# ------------------------------------------------------------------------------------------------ the host


@race
def pinned_memory_is_filled_again(mended: bool) -> None:
    buffer = torch.ones(8).pin_memory()
    buffer.to("cuda", non_blocking=True)
    if mended:
        torch.cuda.current_stream().synchronize()
    buffer.fill_(2)


@race
def read_before_it_is_copied(mended: bool) -> None:
    x = _tensor().to("cpu", non_blocking=True)
    if mended:
        torch.cuda.current_stream().record_event().synchronize()
    x.tolist()


@race
def registered_memory_ends(mended: bool) -> None:
    buffer = torch.ones(1024)
    cudart = torch.cuda.cudart()
    cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 1)
    x = buffer.to("cuda", non_blocking=True)
    if mended:
        x.sum().item()
    cudart.cudaHostUnregister(buffer.data_ptr())


# ------------------------------------------------------------------------------------------------ NCCL


@race
def written_before_a_collective_ends(mended: bool) -> None:
    x = _tensor()
    work = dist.all_reduce(x, async_op=True)
    if mended:
        work.wait()
    x.zero_()
    work.wait()


@race
def wait_on_another_stream(mended: bool) -> None:
    x = _tensor()
    work = dist.all_reduce(x, async_op=True)
    with nullcontext() if mended else torch.cuda.stream(_side(True)):
        work.wait()
    x + 1


@race
def at_once_on_another_stream(mended: bool) -> None:
    x = _tensor()
    with torch.cuda.stream(side := _side(True)):
        dist.all_reduce(x)
    if mended:
        torch.cuda.current_stream().wait_stream(side)
    x + 1


def _messages(x: torch.Tensor, y: torch.Tensor, wait: bool = False) -> None:
    peer = 1 - dist.get_rank()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)])
    for work in works if wait else ():
        work.wait()


@race
def written_while_it_is_sent(mended: bool) -> None:
    x, y = _tensor(), _tensor()
    _messages(x, y, wait=mended)
    x.zero_()


@race
def read_before_it_is_received(mended: bool) -> None:
    x, y = _tensor(), _tensor()
    _messages(x, y, wait=mended)
    y + 1


@race
def loses_its_memory_in_a_collective(mended: bool) -> None:
    x = _tensor()
    work = dist.all_reduce(x, async_op=True)  # keeps the tensor, and not what is its memory now
    if mended:
        work.wait()
    x.data = torch.empty(1, device="cuda")
    _tensor()
    work.wait()


# ------------------------------------------------------------------------------------------------ no races


def tensors_that_a_work_keeps() -> None:
    dist.all_reduce(_tensor(), async_op=True)  # its watchdog keeps them
    work = dist.all_reduce(_tensor(), async_op=True)
    _tensor().zero_()
    work.wait()
    _tensor().zero_()


def messages_that_nobody_waits_for() -> None:
    x, y = _tensor(), _tensor()
    _messages(x, y)
    x.data = torch.empty(1, device="cuda")
    del y
    _tensor().zero_()


def pinned_memory_of_pytorch() -> None:
    torch.ones(8).pin_memory().to("cuda", non_blocking=True)
    torch.ones(8).pin_memory().fill_(2)


GOOD = (tensors_that_a_work_keeps, messages_that_nobody_waits_for, pinned_memory_of_pytorch)


def _of_rank() -> dict[str, str]:
    """What is reported in each case."""
    torch.ops.pretended.races()
    found = {}
    cases = {f"{name} {mended}": (RACES[name], mended) for name in RACES for mended in (False, True)}
    for name, case in (cases | {function.__name__: (function,) for function in GOOD}).items():
        torch.cuda.synchronize()
        dist.barrier()
        try:
            case[0](*case[1:])
            found[name] = torch.ops.pretended.races()
        except RuntimeError as error:
            found[name] = str(error)
    return found


def _run(target: str) -> None:
    from tests.support.ranks import Ranks

    ranks = Ranks(RANKS)
    Path(target).write_text(json.dumps(ranks(RANKS, _of_rank)))
    ranks.close()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    target = tmp_path_factory.mktemp("races") / "found"
    command = [sys.executable, "-m", "tests.support.pretended_cuda", "-m", "tests.campaigns.stream_races", str(target)]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return json.loads(target.read_text())


@pytest.mark.parametrize("name", RACES)
def test_race(found: list[dict[str, str]], name: str) -> None:
    for of_rank in found:
        assert "race of streams" in of_rank[f"{name} False"]
        assert not of_rank[f"{name} True"]


@pytest.mark.parametrize("function", GOOD)
def test_no_race(found: list[dict[str, str]], function: Callable) -> None:
    assert not any(of_rank[function.__name__] for of_rank in found)


if __name__ == "__main__":
    _run(sys.argv[1])
