"""Starts and ends a distributed job: process groups, seeds, and failures of ranks."""

import os
import random
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.cpu_host import support_cpu_host
from megatron.context_parallel.runtime.comm.flight_recorder import recorder

from .checkpoint.store import latest_iteration
from .checkpoint.train_state import Progress
from .config.flags import Arguments
from .faults.crash import leave_after
from .faults.judge import never_came
from .faults.lifetime import end_at_signals, hold_back_sigterm
from .faults.open_files import allow_open_files
from .faults.watch import Watch, wait_for_store

_SEEDS_OF_STAGES = 10**6  # more than the seeds of pipeline stages are apart
_SECONDS_TO_JUDGE = 10  # for the watch to name the rank that the others wait for, before torch raises


@contextmanager
def distributed_job(args: Arguments, progress: Progress | None = None) -> Iterator[Watch]:
    """The process groups of a job and the watch of this rank, until the block ends.

    `progress` is printed when the run is interrupted.

    A failing rank leaves at once, so that its error is the first one in the log when the launcher stops the others.
    """
    watch: Watch | None = None
    signals = {signal.SIGINT} if args.exit_signal_handler else {signal.SIGINT, signal.SIGTERM}
    if args.exit_signal_handler:
        hold_back_sigterm()
    end_at_signals(
        args.rank, signals, lambda name: watch.fail(name) if watch else None, lambda: _last_words(args, progress)
    )
    try:
        recorder.enter("joining")
        allow_open_files(args.world_size)
        store = open_store(args)
        with _store_of_living_rank(args):
            watch = Watch(args, store)
            watch.meet(store)
        join_world(args, store)
        initialize_model_parallel(args)
        recorder.enter("start-up")
        yield watch
    except SystemExit:
        if watch:
            watch.leave()
        raise
    except BaseException as error:
        leave_after(args, error, watch)
    watch.leave()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _last_words(args: Arguments, progress: Progress | None) -> str:
    if progress is None:
        return "interrupted"
    words = f"interrupted at iteration {progress.iteration}"
    if not args.save:
        return words
    saved = latest_iteration(args.save)
    return f"{words}; {'no checkpoint was saved' if saved is None else f'the last checkpoint is iteration {saved}'}"


def open_store(args: Arguments) -> dist.Store:
    """The rendezvous store of the ranks, from torchrun's environment; without one, a store for this process only.

    It does not wait for the other ranks: the watch reports which of them do not join.

    Raises:
        UsageError: no process answers at MASTER_ADDR within `--distributed-timeout-minutes`, or rank 0 ends meanwhile.
    """
    if args.world_size == 1 and "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    if args.rank and "MASTER_ADDR" in os.environ:
        wait_for_store(args)
    try:
        with _stack_of_torch_left_out():
            store, _, _ = next(dist.rendezvous("env://", args.rank, world_size=1, timeout=timeout))  # for one rank
    except dist.DistNetworkError as error:
        if not args.rank:
            raise
        why = str(error).partition("\n")[0]  # rank 0 answered, and ended before this rank was connected
        raise UsageError(f"{never_came([0], timeout.total_seconds())}; {why}") from None
    return store


@contextmanager
def _store_of_living_rank(args: Arguments) -> Iterator[None]:
    """Raise a UsageError that names the process with the job's store, if the store breaks in the block."""
    try:
        yield
    except dist.DistNetworkError as error:
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host = "the launcher of the first host" if by_launcher else "rank 0"
        why = str(error).partition("\n")[0]
        raise UsageError(f"{host} ended before all ranks had joined; {why}") from None


@contextmanager
def _stack_of_torch_left_out() -> Iterator[None]:
    """Hide what torch prints when the block raises: a C++ stack for an error that is raised anyway."""
    real = os.dup(2)
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 2)
        try:
            yield
            printed.seek(0)
            os.write(real, printed.read())
        finally:
            os.dup2(real, 2)
            os.close(real)


def join_world(args: Arguments, store: dist.Store) -> None:
    """Join the process group of all ranks: NCCL, or gloo without a GPU."""
    support_cpu_host()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        args.distributed_backend or ("nccl" if on_gpu else "gloo"),
        store=dist.PrefixStore("default_pg", store),
        rank=args.rank,
        world_size=args.world_size,
        timeout=timedelta(minutes=args.distributed_timeout_minutes, seconds=_SECONDS_TO_JUDGE),
    )


def initialize_model_parallel(args: Arguments) -> None:
    """Create the tensor-, context-, data- and pipeline-parallel groups, and seed every random generator."""
    support_cpu_host()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes + _SECONDS_TO_JUDGE / 60,
        nccl_communicator_config_path=args.nccl_communicator_config_path,
        high_priority_stream_groups=args.high_priority_stream_groups,
        order="tp-cp-ep-dp-pp",
        create_gloo_process_groups=False,
    )
    seed_all(args.seed)


def seed_dropout(seed: int) -> None:
    """Seed the generators after the initial weights are drawn: ranks with other tokens draw other dropout masks."""
    seed_all(seed + _SEEDS_OF_STAGES * parallel_state.get_data_parallel_rank(with_context_parallel=True))


def seed_all(seed: int) -> None:
    """Seed Python, NumPy and PyTorch: stages of a pipeline differ; tensor-parallel ranks differ where Megatron's do."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
