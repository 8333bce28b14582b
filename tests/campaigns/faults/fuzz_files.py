"""Damaged files of every kind that a run reads: each is refused in one line, or accepted."""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from random import Random

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.strategies import STRATEGIES
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.data.batches import KEYS, build_datasets
from megatron.context_parallel.trainer.data.tokenizer import build_tokenizer

from .bench import LAYOUTS, MODEL, TRAINING, Bench, losses
from .fuzz_flags import bounded, one_line_each
from .job import run_job

LAYOUT = "cp2"
CONFIG = """\
# A run, as a file of flags.
num-layers: 2
hidden-size: 32
num-attention-heads: 4
swiglu: true
position-embedding-type: rope
normalization: RMSNorm
seq-length: 64
micro-batch-size: 1
global-batch-size: 2
train-iters: 6
lr: 1e-2
split: 80,10,10
eval-iters: 0
window-size: "16,0"
recompute-granularity: full
recompute-method: uniform
recompute-num-layers: 1
recompute-whitelist: [core_attention]
"""
STRATEGY = """\
from megatron.context_parallel.plan.ir import Attend, Step
from megatron.context_parallel.strategies import Pass, Ring, register


@register("mine", layouts=("zigzag", "cyclic"), channels=("queries", "results"))
def mine(at: Pass):
    there, back = (Ring(at.rank, at.n, channel=name) for name in ("queries", "results"))
    for s in range(at.n + 1):
        comm, chunk = (), there.rank(at.rank - s)
        if s + 1 < at.n:
            comm += there.shift(at.query, lambda r: there.rank(r - s))
        if s > 1:
            comm += back.shift(at.result, lambda r: back.rank(r - s + 1), by=1 - s)
        yield Step(comm, (Attend((chunk,), (at.rank,)),) if s < at.n else ())
"""
TOKENS = b'0 1 -1 4 1e999 9999999999 null true false [] {} "" : , - --- !!python/object: & * \xff \x00 \n'.split()


def mutate(content: bytes, random: Random) -> bytes:
    """Flips bits, or removes, repeats, overwrites or inserts bytes."""
    data = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        at = random.randrange(len(data) + 1)
        to = min(len(data), at + random.choice((1, 2, 8, 64, len(data))))
        kind = random.randrange(7)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            del data[at:]
        elif kind == 2:
            del data[at:to]
        elif kind == 3:
            data[at:at] = random.choice(TOKENS)
        elif kind == 4:
            data[at:to] = random.randbytes(to - at)
        elif kind == 5:
            data[at:at] = data[at:to]
        else:
            data[at : at + 8] = random.choice((0, 1, -1, 2**31, 2**63 - 1, len(data))).to_bytes(
                8, "little", signed=True
            )
    return bytes(data)


class Files:
    """Original files, and a way to try a damaged one of each kind."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.came = bench, Counter[tuple[str, str]]()
        self.folder = bench.fresh("files")
        for path in bench.data.parent.glob("corpus.*"):
            shutil.copy(path, self.folder)
        (self.folder / "config.yaml").write_text(CONFIG)
        (self.folder / "strategy.py").write_text(STRATEGY)
        self.kinds: dict[str, Callable[[Random], None]] = {
            "corpus.idx": self._data,
            "corpus.bin": self._data,
            "corpus.json": self._data,
            "config.yaml": self._config,
            "strategy.py": self._strategy,
            "checkpoint": self._checkpoint,
        }
        for kind in ("corpus.idx", "config.yaml", "strategy.py"):
            self.kinds[kind](Random(0))  # the originals are accepted

    def try_one(self, number: int, seed: int) -> str:
        """Damages file `number` of a seed. Returns a description of a wrong outcome, or nothing."""
        random = Random(f"{seed} {number}")
        # A checkpoint takes a job of its own, so these are fewer.
        kind = (
            "checkpoint" if number % 10 == 9 else random.choice([kind for kind in self.kinds if kind != "checkpoint"])
        )
        path = self.folder / kind
        original = path.read_bytes() if path.exists() else b""
        if original:
            path.write_bytes(mutate(original, random))
        came, wrong = "accepted", ""
        try:
            with bounded(60):
                self.kinds[kind](random)
        except UsageError as error:
            came = "refused"
            try:
                one_line_each(error)
            except AssertionError as fault:
                wrong = str(fault)
        except BaseException as error:
            came, wrong = "failed", f"{type(error).__name__}: {error}"
        self.came[kind, came] += 1
        if original:
            if wrong:
                shutil.copy(path, f"{path}.{number}")
            path.write_bytes(original)
        return wrong and f"{number} {kind}: {wrong}"

    def _data(self, random: Random) -> None:
        """Checks the data, and reads accepted data to the end."""
        os.environ["WORLD_SIZE"] = "1"
        args = parse_args([*f"{MODEL} {TRAINING}".split(), "--data-path", str(self.folder / "corpus")])
        datasets = build_datasets(args, build_tokenizer(args), (12, 2, 2))
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        for dataset in datasets:
            for i in range(len(dataset)):
                sample = dataset[i]
                assert all(sample[key].shape == (args.seq_length,) for key in KEYS)

    def _config(self, random: Random) -> None:
        os.environ["WORLD_SIZE"] = "1"
        data = self.bench.data
        parse_args(["--config", str(self.folder / "config.yaml"), "--data-path", str(data), "--micro-batch-size", "1"])

    def _strategy(self, random: Random) -> None:
        # A copy by another name each time: what was imported once is not read again.
        path = self.folder / f"strategy{random.randrange(10**9)}.py"
        shutil.copy(self.folder / "strategy.py", path)
        os.environ["WORLD_SIZE"] = "2"
        argv = f"{MODEL} {TRAINING} --data-path {self.bench.data} --context-parallel-size 2".split()
        try:
            parse_args([*argv, "--cp-strategy", f"{path}:mine"])
        finally:
            path.unlink()
            STRATEGIES.pop("mine", None)

    def _checkpoint(self, random: Random) -> None:
        """Damages one file of a checkpoint, and resumes from it."""
        save = self.bench.copy(LAYOUT)
        shutil.rmtree(save / "iter_0000006")
        tracker = save / "latest_checkpointed_iteration.txt"
        tracker.write_text("4")
        files = [tracker, *sorted((save / "iter_0000004").iterdir())]
        path = random.choice(files)
        before = path.read_bytes()
        path.write_bytes(mutate(before, random))
        outcome = run_job(self.bench.flags(LAYOUT, save), LAYOUTS[LAYOUT][0], ends_others=True)
        refusals = [line.text for line in outcome.lines if ": error: " in line.text]
        if set(outcome.statuses.values()) == {0}:
            assert losses(save) == self.bench.reference(LAYOUT).losses, f"{path.name}: accepted, with other losses"
        else:
            one = len(refusals) == 1 and outcome.statuses[0] == 2
            assert one, f"{path.name}: {[line.text for line in outcome.lines][-3:]}, {outcome.statuses}"
        shutil.rmtree(save)
        if refusals:
            raise UsageError(refusals[0])
