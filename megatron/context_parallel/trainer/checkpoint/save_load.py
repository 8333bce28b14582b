"""Saves and loads checkpoints. An interrupted save harms nothing; damage is detected before anything is loaded."""

import gc
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.megatron_checkpoint_writer import HAS_COMMON_FILE, take_results_in_this_process
from megatron.context_parallel.runtime.comm.first_rank import of_all_ranks, on_first_rank, raise_alike
from megatron.context_parallel.trainer.config.flags import Arguments

from .manifest import MANIFEST, Manifest, content_faults, file_record, read_manifest, share_of
from .optimizer_state import METADATA, load_optimizer
from .plain_read import plain_reads
from .publish import publish
from .resume import check_resume, check_samples
from .sharded_weights import install_weights, load_weights
from .storage import begin_save, cause_of, raise_kept
from .store import (
    choose_checkpoint,
    clear_leftovers,
    delete,
    faults_of,
    iteration_directory,
    loadable_checkpoints,
    plain_args,
    quick_fault,
    read_saved_args,
    superseded,
)
from .train_state import Progress, TrainState, set_generators, sharded_state

_RANK_LAYOUT = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "data_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
T = TypeVar("T")


def say(line: str) -> None:
    """Print a line, on rank 0 only."""
    if dist.get_rank() == 0:
        print(line, flush=True)


# ---------------------------------------------------------------------------------------------------- saving


class Save:
    """The checkpoint `--save`/iter_NNNNNNN that is being written. Every rank calls the same methods in the same order.

    Threads of each rank write its shards under a temporary name. `finish` then adds the manifest, flushes everything to
    disk, renames the folder, and only then updates the tracker. With `--async-save` the state is copied first, and
    training continues until `finish`.
    """

    def __init__(self, args: Arguments, state: TrainState) -> None:
        assert args.save is not None
        self.args = args
        self.iteration = state.progress.iteration
        self.final = iteration_directory(args.save, self.iteration)
        self.temporary = self.final.with_name(self.final.name + ".incomplete")
        on_first_rank(self._make_room)
        take_results_in_this_process()
        sharded = sharded_state(state, optimizer=not args.no_save_optim, generators=not args.no_save_rng)
        self.request = dist_checkpointing.save(
            sharded, str(self.temporary), content_metadata=METADATA, async_sharded_save=True, **_writer()
        )
        self.records: Manifest = {}
        self.failure: Exception | None = None
        buckets = _on_host(self.request, copy=args.async_save) if self.request.async_fn else []
        self.thread = Thread(target=self._write, args=(buckets,), daemon=True)
        self.thread.start()

    def _make_room(self) -> None:
        begin_save(self.args)
        self.temporary.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(self.temporary.parent)
        self.temporary.mkdir()

    def _write(self, buckets: list) -> None:
        if not buckets:
            return
        results = self.request.async_fn_args[2]
        try:
            with ThreadPoolExecutor(len(buckets)) as pool:
                written = list(pool.map(self._write_shard, range(len(buckets)), buckets))
            results.put(dict(enumerate(written)))
        except Exception as error:
            self.failure = cause_of(error, self.temporary)

    def _write_shard(self, index: int, bucket: tuple) -> list:
        """Write one file with megatron-core's writer. Returns the writer's records of the tensors in it."""
        path, name, _ = bucket
        transforms, _ = self.request.async_fn.args
        outcome: queue.Queue = queue.Queue()
        others: queue.Queue = queue.Queue()
        others.put(index)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, outcome, others, True)
        _, written = outcome.get()
        if isinstance(written, Exception):
            raise written
        self.records[name] = file_record(Path(path))
        return written

    def is_written(self) -> bool:
        """Whether every rank has written its shards, so that `finish` does not wait."""
        writing = torch.tensor([self.thread.is_alive()], dtype=torch.int, device=torch.cuda.current_device())
        dist.all_reduce(writing)
        return not writing.item()

    def finish(self) -> None:
        """Wait for the writers, and make the checkpoint the latest.

        Raises:
            DiskError: writing failed on some rank; every rank raises the same.
        """
        self.thread.join()
        gc.enable()  # the writers disable it, and two that overlap may leave it disabled
        outcomes = of_all_ranks((self.failure, self.records))
        for failure, _ in outcomes:
            if failure:
                raise_alike(failure)
        for finalize in self.request.finalize_fns:
            finalize()
        records = {name: record for _, written in outcomes for name, record in written.items()}
        on_first_rank(lambda: self._publish(records))

    def _publish(self, records: Manifest) -> None:
        raise_kept()
        publish(self.temporary, self.final, plain_args(self.args), records)
        if self.args.keep_last or self.args.save_retain_interval:
            for old in superseded(self.final.parent, self.args.keep_last or 1, self.args.save_retain_interval):
                delete(old)


def _writer() -> dict[str, Any]:
    """megatron-core's own writer with two files for a rank. 0.16 has no other; 0.17 and later must be asked for it."""
    if "async_strategy" not in signature(dist_checkpointing.save).parameters:
        return {}
    return {"async_strategy": "mcore", "sharded_strategy": TorchDistSaveShardedStrategy(thread_count=2)}


def _on_host(request: AsyncRequest, copy: bool) -> list:
    """The tensors of this rank's shards in host memory. With `copy`, training may change the originals."""
    buckets = request.preload_fn()
    if not copy or torch.cuda.is_available():  # with a GPU, weights and optimizer states are not in host memory
        return buckets
    copied = []
    for path, name, (values, tensors) in buckets:
        own = [(item, tensor.clone()) for item, tensor in tensors]
        copied.append((path, name, (values, own)))
    return copied


# --------------------------------------------------------------------------------------------------- loading


def load_checkpoint(args: Arguments, state: TrainState) -> bool:
    """Restore a checkpoint of `--load` into `state`. Returns whether there was one. Every rank calls it.

    The checkpoint is that of `--ckpt-step`, or the latest. All of its files are checked before anything is loaded,
    unless `--no-verify-checkpoint` is given. `--finetune` restores only the weights. `--no-load-optim` and
    `--no-load-rng` omit those parts. On another parallel layout or kind of device the random generators keep their
    fresh seeds.

    Raises:
        UsageError: it is damaged, or its arguments are incompatible with `args`; every rank raises the same.
    """
    paths, fault = on_first_rank(lambda: loadable_checkpoints(args))
    checkpoint = choose_checkpoint(args, paths, fault, lambda path: fault_everywhere(args, path), say)
    if checkpoint is None:
        return False
    on_first_rank(lambda: _check_release(args, checkpoint))
    saved = on_first_rank(lambda: read_saved_args(checkpoint))
    differences = check_resume(args, saved)
    optimizer, generators = _parts_to_load(args, saved)
    wanted = sharded_state(state, optimizer=optimizer, generators=generators, loading=True)
    again = _is_to_compute_again(args, saved, checkpoint)
    if again:
        wanted["rerun"] = state.findings.machine.state_dict(None, "torch_dist", force=True)
    absent = _take_out_absent(args, wanted, len(state.model), checkpoint)
    loaded = read_checkpoint(args, wanted, checkpoint)
    if not args.finetune:
        progress = Progress(**loaded["progress"])
        check_samples(args, saved, progress.iteration, progress.consumed_train_samples)
        state.progress.__dict__.update(loaded["progress"])
    for index, chunk in enumerate(state.model):
        load_weights(chunk, loaded[f"model{index}"] | absent[index])
    if optimizer:
        load_optimizer(state.optimizer, state.model, loaded["optimizer"])
    for chunk in state.model:
        install_weights(chunk)
    if not optimizer:
        state.optimizer.reload_model_params()
    if generators and not set_generators(loaded["rng"]):
        say("warning: saved on another kind of device, so the random generators keep their fresh seeds")
    if not args.finetune:
        state.scheduler.load_state_dict(loaded["scheduler"])
    if again:
        state.findings.machine.load_state_dict(loaded["rerun"])
    if differences:
        say(differences)
    return True


def _check_release(args: Arguments, checkpoint: Path) -> None:
    manifest = read_manifest(checkpoint)
    if HAS_COMMON_FILE and manifest is not None and COMMON_STATE_FNAME not in manifest:
        raise UsageError(
            f"--load {args.load}: {checkpoint.name} was saved with megatron-core 0.19 or later, and this is "
            f"{megatron.core.__version__}; install megatron-core 0.19, or give another --load"
        )


def _take_out_absent(args: Arguments, wanted: dict, models: int, checkpoint: Path) -> list[dict[str, None]]:
    """Removes the FP8 states of Transformer Engine's modules from `wanted`, if the checkpoint lacks them.

    Returns:
        For each model chunk, the values that its modules get instead: None, with which they start fresh.
    """
    with _reading(args, checkpoint):
        saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    absent: list[dict[str, None]] = []
    for model in (wanted[f"model{index}"] for index in range(models)):
        states = {name: x for name, x in model.items() if isinstance(x, ShardedObject) and "_extra_state" in name}
        absent.append({name: None for name, x in states.items() if x.unique_key not in saved})
        for name in absent[-1]:
            del model[name]
    return absent


def fault_everywhere(args: Arguments, checkpoint: Path) -> str | None:
    """Why a checkpoint must not be loaded, the same on every rank. Each file is read once, by one rank."""
    quick = on_first_rank(lambda: quick_fault(checkpoint))
    if quick or args.no_verify_checkpoint:
        return quick
    manifest = on_first_rank(lambda: read_manifest(checkpoint))
    if manifest is None:
        say(f"warning: --load {args.load}: {checkpoint.name} was saved without a manifest and is not verified")
        return None
    mine = content_faults(checkpoint, manifest, share_of(manifest, dist.get_rank(), dist.get_world_size()))
    return faults_of(checkpoint, sorted(fault for faults in of_all_ranks(mine) for fault in faults))


def _parts_to_load(args: Arguments, saved: dict) -> tuple[bool, bool]:
    """Whether to restore the optimizer, and whether the random generators, of a checkpoint with arguments `saved`."""
    optimizer = not (args.finetune or args.no_load_optim or saved["no_save_optim"])
    return optimizer, _same_ranks(args, saved) and not (args.finetune or args.no_load_rng or saved["no_save_rng"])


def _same_ranks(args: Arguments, saved: dict) -> bool:
    return all(saved.get(size, 1) == getattr(args, size) for size in _RANK_LAYOUT)


def _is_to_compute_again(args: Arguments, saved: dict, checkpoint: Path) -> bool:
    """Whether `--rerun-mode` saved the checkpoint to repeat its next step on other devices, and this run will do so."""
    if args.finetune or "rerun" not in read_checkpoint(args, None, checkpoint):
        return False
    reason = "" if args.rerun_mode == "validate_results" else "because --rerun-mode validate_results is not given"
    if not _same_ranks(args, saved):
        reason = "because the parallel layout has changed"
    if reason:
        say(f"--load {args.load}: the suspicious step is not repeated for comparison, {reason}")
    return not reason


def read_checkpoint(args: Arguments, wanted: dict | None, checkpoint: Path) -> dict:
    """The parts `wanted` of a checkpoint, and the values common to all ranks; with None, only these values.

    Every rank calls it.

    Raises:
        UsageError: it is damaged, or holds more than data; every rank raises the same.
    """
    loaded: dict = {}
    failure: UsageError | None = None
    try:
        with _reading(args, checkpoint):
            FileSystemReader(checkpoint).read_metadata()  # if it is damaged, load would print a traceback first
            if wanted is None:
                loaded = dist_checkpointing.load_common_state_dict(str(checkpoint))
            else:
                loaded = dist_checkpointing.load(wanted, str(checkpoint))
    except UsageError as error:
        failure = error
    # From megatron-core 0.19 on, a rank notices only errors in its own part.
    for found in of_all_ranks(failure):
        if found:
            raise_alike(found)
    return loaded


@contextmanager
def _reading(args: Arguments, checkpoint: Path) -> Iterator[None]:
    """A context that reads a checkpoint as data only. A damaged or deleted checkpoint raises UsageError."""
    try:
        with plain_reads(checkpoint):
            yield
    except UsageError:
        raise
    except (Exception, CheckpointException) as error:  # damage breaks any of their parsers
        if fault := quick_fault(checkpoint):
            raise UsageError(f"--load {args.load}: {fault}, after it was checked; give another --load") from error
        if (checkpoint / MANIFEST).exists() and not args.no_verify_checkpoint:  # the files are whole
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UsageError(
            f"--load {args.load}: {checkpoint.name} cannot be read ({why}); give another --load"
        ) from error
