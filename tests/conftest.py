"""Ranks for the tests: processes that start once per run and join a gloo world of the size a test asks for."""

import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta

import pytest
import torch

WORLD = 4
torch.set_num_threads(1)


def _serve(rank: int, pipe) -> None:
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # the test run is over, or died
            return
        world, store, function, args = job
        os.environ["WORLD_SIZE"] = str(world)
        try:
            _join(world, store, rank)
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def _join(world: int, store: str, rank: int) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        if dist.get_world_size() == world and not store:
            return
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )


class Ranks:
    """`ranks(n, function, *args)` runs `function(*args)` on n ranks and returns their results in rank order."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "megatron.core.parallel_state"])
        self.directory = tempfile.TemporaryDirectory()
        self.pipes, self.processes, self.world, self.joins = [], [], 0, 0
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs))  # not a daemon: checkpoint writers are its children
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __call__(self, n: int, function, *args) -> list:
        store = ""
        if n != self.world:
            self.joins += 1
            self.world, store = n, os.path.join(self.directory.name, f"store{self.joins}")
        for pipe in self.pipes[:n]:
            pipe.send((n, store, function, args))
        replies = [pipe.recv() for pipe in self.pipes[:n]]
        failures = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(replies) if not good]
        if failures:
            self.world = 0  # the next call starts from a fresh group
            raise AssertionError("\n".join(failures))
        return [result for _, result in replies]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.join(5)
            process.kill()
        self.directory.cleanup()


@pytest.fixture(scope="session")
def ranks():
    pool = Ranks()
    yield pool
    pool.close()
