"""`--profile`: some iterations of some ranks under torch.profiler, or marked for nsys."""

import json
from pathlib import Path
from typing import Any

import torch

from megatron.context_parallel.runtime.profiler_ranges import Mark, marks

from .checkpoint.save_load import say
from .config.flags import Arguments


class Profile:
    """The profile of this rank, from iteration `--profile-step-start` (counted from 0) until `--profile-step-end`."""

    def __init__(self, args: Arguments) -> None:
        self.args = args
        self._asked = args.profile and args.rank in args.profile_ranks
        self._first = True
        self._torch: torch.profiler.profile | None = None
        self._nsys: Any = None

    def at(self, iteration: int) -> None:
        """Starts or stops profiling before an iteration."""
        if not self._asked:
            return
        start, end = self.args.profile_step_start, self.args.profile_step_end
        if marks.on and iteration >= end:
            self.end()
        elif not marks.on and start <= iteration < end:
            self._begin()
        elif self._first and iteration >= end:
            say(f"--profile-step-end {end}: the run resumes at iteration {iteration}; nothing is profiled")
        self._first = False

    def _begin(self) -> None:
        marks.start()
        if self.args.use_pytorch_profiler:
            kinds = torch.profiler.ProfilerActivity
            on_gpu = [kinds.CUDA] if torch.cuda.is_available() else []
            self._torch = torch.profiler.profile(activities=[kinds.CPU, *on_gpu], record_shapes=True)
            self._torch.start()
        else:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStart())
            self._nsys = torch.autograd.profiler.emit_nvtx(record_shapes=True)
            self._nsys.__enter__()

    def end(self) -> None:
        """Writes the profile, if profiling has started."""
        if not marks.on:
            return
        batches = marks.stop()
        if self._torch:
            self._torch.stop()
            assert self.args.tensorboard_dir  # checked with the flags
            path = trace_path(self.args.tensorboard_dir, self.args.rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._torch.export_chrome_trace(str(path))
            _add(path, batches, self.args.rank)
            self._torch = None
        else:
            torch.cuda.check_error(torch.cuda.cudart().cudaProfilerStop())
            self._nsys.__exit__(None, None, None)


def trace_path(folder: str, rank: int) -> Path:
    """The trace file of a rank, with the suffix that TensorBoard's plugin expects."""
    return Path(folder) / f"rank{rank}.pt.trace.json"


def _add(path: Path, batches: list[Mark], rank: int) -> None:
    """Adds a lane for each channel to a trace of torch.profiler."""
    trace = json.loads(path.read_text())
    since = trace.get("baseTimeNanoseconds", 0)
    for channel, name, begin, end in batches:
        times = {"ts": (begin - since) / 1e3, "dur": (end - begin) / 1e3}
        trace["traceEvents"].append({"ph": "X", "cat": "plan", "name": name, "pid": f"plan of rank {rank}",
                                     "tid": channel, **times})  # fmt: skip
    path.write_text(json.dumps(trace))
