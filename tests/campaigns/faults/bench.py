"""The tiny runs into which faults are injected: data, layouts, flags, and the losses of the undisturbed run."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from .job import Outcome, run_job

MODEL = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --make-vocab-size-divisible-by 8 --init-method-std 0.1"
)
ITERATIONS = 6
TRAINING = (
    f"--seq-length 64 --micro-batch-size 1 --global-batch-size 2 --train-iters {ITERATIONS} --lr 1e-2 "
    "--lr-decay-style cosine --split 80,10,10 --eval-interval 3 --eval-iters 1 --log-interval 1 "
    "--num-workers 0 --distributed-timeout-minutes 1"
)
CP4 = "--context-parallel-size 4 --cp-strategy "
LAYOUTS = {  # ranks, flags
    "ring cp4": (4, CP4 + "ring --use-distributed-optimizer"),
    "mesh cp4": (4, CP4 + "mesh:grid=2x2"),
    "allgather cp4": (4, CP4 + "allgather"),
    "ulysses cp4": (4, CP4 + "ulysses"),
    "attention2d cp4": (4, CP4 + "attention2d"),
    "cp2 tp2": (4, "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"),
    "cp2 pp2": (4, "--context-parallel-size 2 --pipeline-model-parallel-size 2"),
    "cp2 dp2": (4, "--context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce"),
    "cp2": (2, "--context-parallel-size 2"),
}
CLOCKS = {"step_time", "tokens_per_second_per_rank", "tflops_per_rank", "memory_bytes"}


@dataclass(frozen=True)
class Reference:
    """The undisturbed run of a layout: its numbers, its checkpoints and its events, [phase, iteration] by rank."""

    losses: list[dict]
    save: Path
    events: list[dict[tuple[str, int], int]]
    outcome: Outcome


class Bench:
    """A directory with data, and one for each run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = directory / "data" / "corpus"
        self._references: dict[str, Reference] = {}
        self._runs = 0
        if not self.data.with_suffix(".idx").exists():
            self.data.parent.mkdir(parents=True)
            write_data(self.data)

    def fresh(self, name: str) -> Path:
        """A new directory with this name."""
        self._runs += 1
        path = self.directory / f"{self._runs:04d}-{name.replace(' ', '-')}"
        path.mkdir()
        return path

    def flags(self, layout: str, save: Path | None = None, more: str = "") -> list[str]:
        """The command line of a layout that saves to and loads from `save`; `more` wins."""
        argv = f"{MODEL} {TRAINING} {LAYOUTS[layout][1]} --data-path {self.data}".split()
        return argv + (f"--save {save} --load {save} --save-interval 2".split() if save else []) + more.split()

    def run(self, layout: str, save: Path | None = None, *, more: str = "", **how) -> Outcome:
        """Run a layout with `run_job`. Its output is kept in a file."""
        outcome = run_job(self.flags(layout, save, more), LAYOUTS[layout][0], **how)
        (self.fresh("output") / "lines.txt").write_text(outcome.text)
        return outcome

    def reference(self, layout: str) -> Reference:
        """The undisturbed run; the first call runs it."""
        if layout not in self._references:
            save, counts = self.fresh(f"{layout} undisturbed"), self.fresh("counts")
            outcome = self.run(layout, save, counts=counts)
            assert set(outcome.statuses.values()) == {0}, f"{layout} fails undisturbed:\n{outcome.text}"
            events = []
            for rank in range(LAYOUTS[layout][0]):
                counted = json.loads((counts / f"{rank}.json").read_text())
                events.append({(phase, iteration): count for phase, iteration, count in counted})
            self._references[layout] = Reference(losses(save), save, events, outcome)
        return self._references[layout]

    def forget(self) -> None:
        """Delete the files of all runs except the undisturbed ones."""
        kept = {reference.save for reference in self._references.values()} | {self.data.parent}
        for path in set(self.directory.iterdir()) - kept:
            shutil.rmtree(path)

    def copy(self, layout: str) -> Path:
        """A copy of the checkpoints and files of the undisturbed run, from which another run can resume."""
        path = self.fresh(layout)
        shutil.copytree(self.reference(layout).save, path, dirs_exist_ok=True)
        return path


def write_data(prefix: Path, documents: int = 120, seed: int = 0, largest: int = 256) -> None:
    """Documents of random bytes in .bin and .idx, each ended by token 256."""
    random = numpy.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length in random.integers(20, 120, documents):
        tokens = numpy.append(random.integers(0, largest, length), 256)
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    made_by = {"tokenizer_type": "ByteLevelTokenizer", "tokenizer_model": None, "vocab_size": 257}
    prefix.with_suffix(".json").write_text(json.dumps(made_by))


def losses(save: Path) -> list[dict]:
    """The records of metrics.jsonl without times."""
    records = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        for clock in CLOCKS:
            record.pop(clock, None)
    return records
