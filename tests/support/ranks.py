"""Ranks for the tests: processes that start once per run. Each call forms a gloo world of the requested size."""

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from megatron.context_parallel.cli.run_main import ignore_warnings_of_libraries
from tests.support.backtrace import backtrace, record_crash

WORLD = 6
MODELS = DistributedDataParallel, MegatronFSDP  # that may outlive a call


def _serve(rank: int, pipe, of_parent: list, directory: str) -> None:
    for other in of_parent:
        other.close()  # so that this pipe ends with the parent
    record_crash(Path(directory) / f"rank{rank}")
    torch.set_num_threads(1)
    if torch.cuda.is_available():  # a pretended one
        torch.cuda.set_device(rank)
    ignore_warnings_of_libraries()
    gc.freeze()  # what is imported stays: no collection looks at it
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    while True:
        try:
            job = pipe.recv()
        except EOFError:  # the test run is over, or died
            return
        world, store, function, args = job
        os.environ["WORLD_SIZE"] = str(world)
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=60),
        )
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        try:
            pipe.recv()  # all have replied: none is still connecting to this one
        except EOFError:
            return
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()  # with every group made in it: their threads would pile up
        _clear_sharding_prop_cache()  # results of DTensor have meshes, whose groups have the names of this call
        gc.collect()
        _empty_models()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # what a call that failed has left
        gc.freeze()  # the next collection looks at what is new alone


def _empty_models() -> None:
    """Garbage of Megatron's models: autograd's graphs keep some alive, with their groups and the groups' threads."""
    left = [model for model in gc.get_objects() if type(model) in MODELS]
    for module in [module for model in left for module in model.modules()]:
        vars(module).clear()
    if left:
        gc.collect()


class Ranks:
    """`ranks(n, function, *args)` runs `function(*args)` on n ranks and returns their results in rank order.

    The ranks are forks of this process: they have what it has imported. Start them before it computes anything.
    """

    def __init__(self, world: int = WORLD) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.world, self.calls = world, 0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes, self.began = [], [], time.time()
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            self.pipes.append(ours)
            arguments = rank, theirs, self.pipes, self.directory.name
            process = context.Process(target=_serve, args=arguments)  # no daemon: it has children
            process.start()
            theirs.close()
            self.processes.append(process)

    def __call__(self, n: int, function, *args) -> list:
        self.calls += 1
        store = os.path.join(self.directory.name, f"store{self.calls}")
        try:
            for pipe in self.pipes[:n]:
                pipe.send((n, store, function, args))
            replies = [pipe.recv() for pipe in self.pipes[:n]]
            for pipe in self.pipes[:n]:
                pipe.send(None)
        except (EOFError, ConnectionError):
            raise AssertionError(self._restart()) from None
        failures = [f"rank {rank}:\n{text}" for rank, (good, text) in enumerate(replies) if not good]
        if failures:
            raise AssertionError("\n".join(failures))
        return [result for _, result in replies]

    def _restart(self) -> str:
        """Starts other ranks, so that a dead one fails a single test. Returns which ranks died, how, and where."""
        ended = wait([process.sentinel for process in self.processes], timeout=30)
        for process in self.processes:
            if process.sentinel in ended:
                process.join()
        died = {rank: process.exitcode for rank, process in enumerate(self.processes) if process.exitcode is not None}
        text = f"ranks that died, with their exit codes: {died}"
        for rank in died:
            text += f"\nrank {rank}:\n{backtrace(Path(self.directory.name) / f'rank{rank}', self.began)}"
        self._end(patience=0)
        self._start()
        return text

    def _end(self, patience: float) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.close()
            process.join(patience)
            process.kill()

    def close(self) -> None:
        self._end(patience=5)
        self.directory.cleanup()
