"""The logs of a run: one line per interval, metrics.jsonl, TensorBoard, Weights & Biases, a progress bar."""

import importlib.util
import json
import math
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from megatron.context_parallel.errors import UsageError

from .checkpoint.train_state import Progress as RunProgress
from .config.flags import Arguments
from .config.samples import batch_size
from .config.workload import model_of

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

NO_LOSS = "no token has a loss, for example because all are padding, or prompts of answers that were cut off"
# Dense bf16 peak in TFLOP/s, by the driver's name of the device; other devices need --peak-tflops.
_PEAK_TFLOPS = {
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H200": 989.4,
}


@dataclass
class Record:
    """One line of `metrics.jsonl`: means over the iterations of a process since its previous line, and the state then.

    `lr` is the learning rate of the next iteration. `tokens_per_second_per_rank` counts padding too.
    """

    iteration: int
    consumed_samples: int
    lm_loss: float | None  # None: no iteration has one
    lr: float
    grad_norm: float | None  # None: the update was skipped
    step_time: float  # seconds per iteration
    tokens_per_second_per_rank: float
    tflops_per_rank: float
    memory_bytes: int
    iterations_without_loss: int = 0  # all tokens of their batch are masked


class RunLog:
    """Collects iterations and writes them to rank 0's terminal, files and trackers. Other ranks write nothing."""

    def __init__(self, args: Arguments, progress: RunProgress) -> None:
        self.args = args
        self.speaks = dist.get_rank() == 0
        self.peak = args.peak_tflops or _device_peak()
        self.losses: list[float | None] = []
        self.seconds = self.flops = 0.0
        self.consumed = progress.consumed_train_samples
        self.metrics: IO[str] | None = None
        self.tensorboard: SummaryWriter | None = None
        self.wandb: Any = None
        self.bar: Progress | None = None
        self.warned = self.told_memory = self.told_no_loss = False
        if self.speaks:
            self._open(progress.iteration)
            self.say(_explain(args, self.peak))

    def _open(self, iteration: int) -> None:
        args = self.args
        again = None if args.skip_train else iteration + 1  # the first iteration that is logged again
        if args.save:
            self.metrics = _resume_metrics(Path(args.save) / "metrics.jsonl", again or math.inf)
        if args.tensorboard_dir:
            from torch.utils.tensorboard import SummaryWriter

            threading.excepthook = _quiet_about_tensorboard
            self.tensorboard = SummaryWriter(args.tensorboard_dir, purge_step=again)
        if args.wandb_project:
            self.wandb = _start_wandb(args)
        if sys.stdout.isatty():
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns)
            self.task = self.bar.add_task("", total=args.train_iters, completed=iteration)
            self.bar.start()

    def say(self, line: str) -> None:
        """Print a line, on rank 0 only. A full disk behind standard output does not stop the run."""
        with suppress(OSError):
            if self.bar:
                self.bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
            elif self.speaks:
                print(line, flush=True)

    @contextmanager
    def _tolerant(self) -> Iterator[None]:
        """If metrics cannot be written, training continues without them; the first time prints a warning."""
        try:
            yield
        except OSError as error:
            if not self.warned:
                self.say(f"warning: metrics cannot be written ({error}); training continues")
            self.warned = True

    def iteration_done(
        self,
        progress: RunProgress,
        loss: float | None,
        lr: float,
        grad_norm: float | None,
        flops: float,
        seconds: float,
    ) -> None:
        """Count an iteration of so many operations and seconds; at each `--log-interval` write a record."""
        self.losses.append(loss)
        if loss is None and not self.told_no_loss:
            self.told_no_loss = True
            where = f"warning: iteration {progress.iteration}"
            self.say(f"{where}: {NO_LOSS}; momentum and weight decay alone change the weights")
        self.flops += flops
        self.seconds += seconds
        if self.bar:
            self.bar.update(self.task, completed=progress.iteration)
        if progress.iteration % self.args.log_interval == 0:
            self._write(self._record(progress, lr, grad_norm))
            self.losses, self.consumed = [], progress.consumed_train_samples
            self.seconds = self.flops = 0.0

    def _record(self, progress: RunProgress, lr: float, grad_norm: float | None) -> Record:
        args = self.args
        step_time = self.seconds / len(self.losses)
        losses = [loss for loss in self.losses if loss is not None]
        samples = progress.consumed_train_samples - self.consumed
        rank_seconds = self.seconds * args.world_size
        return Record(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_train_samples,
            lm_loss=sum(losses) / len(losses) if losses else None,
            lr=lr,
            grad_norm=grad_norm,
            step_time=step_time,
            tokens_per_second_per_rank=samples * args.seq_length / rank_seconds,
            tflops_per_rank=self.flops / rank_seconds / 1e12,
            memory_bytes=_memory_bytes(),
            iterations_without_loss=len(self.losses) - len(losses),
        )

    def _write(self, record: Record) -> None:
        if not self.speaks:
            return
        self.say(line_of(record, self.args.train_iters, self.peak))
        if not self.told_memory:
            self.told_memory = True
            self.say(f"memory: {record.memory_bytes / 2**30:.2f} GiB on this rank after {len(self.losses)} iterations")
        self._publish(asdict(record))

    def evaluation_done(self, iteration: int, split: str, loss: float | None) -> None:
        """Log the loss of an evaluation on `split` ("validation" or "test"); None: it has none."""
        if not self.speaks:
            return
        told = f"no loss: {NO_LOSS}" if loss is None else f"lm loss {loss:.6f}"
        self.say(f"{split} at iteration {iteration} | {told}")
        self._publish({"iteration": iteration, f"{'valid' if split == 'validation' else split}_loss": loss})

    def is_tested(self, iteration: int) -> bool:
        """Whether `metrics.jsonl` has the loss of the test split at `iteration`; for rank 0, which has the file."""
        if self.metrics is None:
            return False
        lines = Path(self.metrics.name).read_text().splitlines()
        return any("test_loss" in line and _iteration_of(line) == iteration for line in lines)

    def _publish(self, numbers: dict[str, Any]) -> None:
        iteration = numbers["iteration"]
        known = {name: value for name, value in numbers.items() if value is not None}
        if self.metrics:
            with self._tolerant():
                self.metrics.write(json.dumps(numbers) + "\n")
                self.metrics.flush()
        if self.tensorboard:
            with self._tolerant():
                for name, value in known.items():
                    self.tensorboard.add_scalar(name, value, iteration)
        if self.wandb:
            self.wandb.log(known, step=iteration)

    def close(self) -> None:
        """Flush and close every output."""
        if self.bar:
            self.bar.stop()
        for output in (self.metrics, self.tensorboard):
            if output:
                with self._tolerant():
                    output.close()
        if self.wandb:
            self.wandb.finish()


def _quiet_about_tensorboard(thread: threading.ExceptHookArgs) -> None:
    # If the disk is full, its writer prints a traceback and then raises in the logging thread.
    if not (issubclass(thread.exc_type, OSError) and type(thread.thread).__name__ == "_AsyncWriterThread"):
        threading.__excepthook__(thread)


def line_of(record: Record, train_iters: int, peak: float | None) -> str:
    """The line of a record on the terminal. `peak`: TFLOP/s of a device, if known."""
    milliseconds = record.step_time * 1e3
    left = round((train_iters - record.iteration) * record.step_time)
    parts = [
        f"iteration {record.iteration:{len(str(train_iters))}d}/{train_iters}",
        _told_loss(record),
        f"lr {record.lr:.1e}",
        "update skipped" if record.grad_norm is None else f"grad norm {record.grad_norm:.2f}",
        f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms",
        f"{record.tokens_per_second_per_rank:.0f} tokens/s/rank",
    ]
    if peak:
        parts.append(f"{record.tflops_per_rank:.1f} TFLOP/s/rank, MFU {100 * record.tflops_per_rank / peak:.1f}%")
    return " | ".join([*parts, f"ETA {str(timedelta(seconds=left)).removeprefix('0:').removeprefix('0')}"])


def _told_loss(record: Record) -> str:
    if record.lm_loss is None:
        return "no loss"
    without = record.iterations_without_loss
    return f"loss {record.lm_loss:.4f}" + (f" (iterations without: {without})" if without else "")


def _explain(args: Arguments, peak: float | None) -> str:
    """The size of the job in one line, in units that fit a small model and a large one."""
    flops = model_of(args).flops_per_sequence(args.seq_length)
    smallest = f"{batch_size(args, 0)} to " if args.rampup_batch_size else ""
    whole = ", if each were one document" if args.reset_attention_mask else ""
    line = (
        f"training: {args.train_iters} iterations of {smallest}{args.global_batch_size} sequences of "
        f"{args.seq_length} tokens; {_si(flops)}FLOP each{whole}"
    )
    return f"{line}; MFU is relative to {peak:g} TFLOP/s per rank" if peak else line


def _si(number: float) -> str:
    """A number of at least 1 with an SI prefix, such as "9.66 G"."""
    thousands = min(int(math.log10(number)) // 3, 6)
    return f"{number / 1000**thousands:.3g} {' kMGTPE'[thousands].strip()}"


def _device_peak() -> float | None:
    return _PEAK_TFLOPS.get(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def _memory_bytes() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _resume_metrics(path: Path, again: float):
    """The file, open for appending, without the lines of iterations from `again` on, which the run will repeat."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in old if line.endswith("\n") and _iteration_of(line) < again]
    if kept != old:
        draft = path.with_suffix(".incomplete")  # keeps the old file if the disk is full
        draft.write_text("".join(kept))
        draft.replace(path)
    return path.open("a")


def _iteration_of(line: str) -> float:
    try:
        return json.loads(line)["iteration"]
    except (ValueError, TypeError, KeyError):  # truncated by a full disk
        return math.inf


def check_trackers(args: Arguments) -> None:
    """Check, before anything starts, that the packages are installed that `args` needs.

    Raises:
        UsageError: `--wandb-project` is given, and wandb is not installed.
    """
    if args.wandb_project and importlib.util.find_spec("wandb") is None:
        raise UsageError(f"--wandb-project {args.wandb_project}: the package wandb is not installed; pip install wandb")


def _start_wandb(args: Arguments):
    import wandb

    return wandb.init(
        project=args.wandb_project,
        name=args.wandb_exp_name or None,
        dir=args.wandb_save_dir or args.save,
        config={name: str(value) for name, value in vars(args).items()},
    )
