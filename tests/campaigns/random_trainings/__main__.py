"""Random models trained in random parallel layouts: what they learn and log is that of one rank.

    python -m tests.campaigns.random_trainings --seconds 60 --seed 1

A case is a model with its data, numbers and schedule, and one to three parts of a run. Each part has a parallel layout
of 1 to 4 ranks, a strategy, and what is recomputed, sharded and moved, and resumes from the checkpoint of the one
before. Losses, gradient norms, evaluations and logs are compared with one rank that trains without a stop, from the
same weights. What a command line cannot combine is refused in one line. Each failure prints the number that runs it
again (`--only`). The exit status is 1 if there is one, or if most cases were refused.

Every order of summation rounds in another way. In 16 bits, and where a difference in float32 is more than `CLOSE`, one
rank also trains with matrix products that are summed in 2 and in 4 parts. A difference is a failure if it is more than
`SAFE` times the largest difference of these.
"""

import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tests.support.numbered_cases import numbered, read_flags
from tests.support.ranks import Ranks

from .draw import SEQUENCE, Case, Part, draw, write_data
from .run import Run, save_start, train
from .schedule import Schedule

RANKS = 4
CLOSE = {"loss": 5e-6, "norm": 5e-5, "evaluation": 5e-6}  # relative
SAFE = 5
ORDERS = 2, 4  # parts of the sums of one rank


@dataclass
class Whole:
    """A run from its first to its last iteration: losses, norms, operations of iterations, and evaluations."""

    runs: list[Run]

    def numbers(self) -> dict[str, list]:
        """By kind, in the order of time."""
        evaluations = [(at, split) for run in self.runs for at, split, _ in run.evaluations]
        return {
            "loss": [loss for run in self.runs for loss in run.losses],
            "norm": [norm for run in self.runs for norm in run.norms],
            "evaluation": [loss for run in self.runs for *_, loss in run.evaluations],
            "evaluated": evaluations,
        }


def check(ranks: Ranks, case: Case, data: str, shares: list[float]) -> str:
    """What is wrong, or nothing; "refused: ..." for a command line that is refused.

    Args:
        data: the folder of the data.
        shares: gets differences, in the largest ones of other orders of summation.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            return _check(ranks, case, data, folder, shares)
        except AssertionError as error:
            refused = re.search("UsageError: (.*)", str(error))
            return f"refused: {refused[1]}" if refused else str(error)


def _check(ranks: Ranks, case: Case, data: str, folder: str, shares: list[float]) -> str:
    model, numbers = case.model.replace("DATA", data), case.numbers
    begin = f"--load {folder}/start --finetune"
    ranks(1, save_start, model, numbers, f"{folder}/start")
    first = f"{model} {begin}"
    (one,) = ranks(1, train, first, numbers)
    allowed, runs = dict(CLOSE), []
    for number, part in enumerate(case.parts):
        there = f"{folder}/part{number}"
        run = ranks(part.ranks, train, f"{model} {begin} --save {there} {_until(part)} {part.flags}", numbers)
        runs.append(run)
        begin = f"--load {there}"
    wholes = [Whole([run[min(rank, len(run) - 1)] for run in runs]) for rank in range(RANKS)]
    if numbers != "float32" or any(compare(whole, Whole([one]), CLOSE, []) for whole in wholes):
        others = [Whole(ranks(1, train, first, numbers, parts)) for parts in ORDERS]
        spread = [largest_differences(other, Whole([one])) for other in others]
        allowed = {what: max(SAFE * max(each[what] for each in spread), CLOSE[what]) for what in CLOSE}
    for whole in wholes:
        if wrong := compare(whole, Whole([one]), allowed, shares):
            return wrong
    if wrong := check_log(case, wholes[0], one):
        return wrong
    return _check_evaluation(ranks, case, f"{model} {begin} --skip-train", allowed) if case.evaluated else ""


def _until(part: Part) -> str:
    return f"--exit-interval {part.stop}" if part.stop else ""


def _check_evaluation(ranks: Ranks, case: Case, flags: str, allowed: dict[str, float]) -> str:
    assert case.evaluated
    (one,) = ranks(1, train, flags, case.numbers)
    for run in ranks(case.evaluated.ranks, train, f"{flags} {case.evaluated.flags}", case.numbers):
        if wrong := compare(Whole([run]), Whole([one]), allowed, []):
            return f"--skip-train: {wrong}"
    return ""


def difference(a: float | None, b: float | None) -> float:
    """Relative; infinite if only one is a number."""
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b) / max(abs(b), 1e-30)


def largest_differences(a: Whole, b: Whole) -> dict[str, float]:
    """By kind of number."""
    mine, others = a.numbers(), b.numbers()
    return {what: max(map(difference, mine[what], others[what]), default=0.0) for what in CLOSE}


def compare(whole: Whole, one: Whole, allowed: dict[str, float], shares: list[float]) -> str:
    """How numbers differ from those of one rank, or nothing."""
    mine, others = whole.numbers(), one.numbers()
    for what, values in mine.items():
        if len(values) != len(others[what]) or (what == "evaluated" and values != others[what]):
            return f"{what}: {values}, not {others[what]}"
    for what, off in largest_differences(whole, one).items():
        if allowed[what] != CLOSE[what]:
            shares.append(SAFE * off / max(allowed[what], 1e-30))
        if not off <= allowed[what]:
            return f"{what} differs by {off:.2e} ({allowed[what]:.1e} allowed): {mine[what]}, not {others[what]}"
    return ""


# ------------------------------------------------------------------------------------------------ the log


def check_log(case: Case, whole: Whole, one: Run) -> str:
    """What the log says wrong about a run, or nothing."""
    schedule = case.schedule
    wrong = _check_flops(whole, one)
    consumed = updated = done = 0
    for run, part in zip(whole.runs, case.parts, strict=True):
        for record in run.records:
            if "lm_loss" not in record:
                continue
            sequences = schedule.batches[done]
            done, consumed = done + 1, consumed + sequences
            updated += sequences if record["grad_norm"] is not None else 0
            wrong = wrong or _check_record(record, done, consumed, sequences, part.ranks, schedule.rate(updated))
    return wrong or _check_evaluations(schedule, whole)


def _check_record(record: dict, iteration: int, consumed: int, sequences: int, ranks: int, rate: float) -> str:
    if (record["iteration"], record["consumed_samples"]) != (iteration, consumed):
        return f"log: {record}, not iteration {iteration} and {consumed} samples"
    if abs(record["lr"] - rate) > 1e-9 * max(rate, 1e-3):
        return f"log: learning rate of {record}, not {rate}"
    tokens = record["tokens_per_second_per_rank"] * record["step_time"] * ranks
    if difference(tokens, sequences * SEQUENCE) > 1e-9:
        return f"log: {tokens} tokens in {record}, not {sequences * SEQUENCE}"
    return ""


def _check_flops(whole: Whole, one: Run) -> str:
    if any(run.vocabulary != one.vocabulary for run in whole.runs):
        return ""  # which counts rows that pad it
    flops = [each for run in whole.runs for each in run.flops]
    off = max(map(difference, flops, one.flops))
    return f"operations differ by {off}: {flops}, not {one.flops}" if off > 1e-9 else ""


def _check_evaluations(schedule: Schedule, whole: Whole) -> str:
    due = []
    if schedule.evaluated:
        due = [(at, "validation") for at in range(1, 5) if at % schedule.evaluated == 0]
        due.append((4, "test"))
    got = whole.numbers()["evaluated"]
    return "" if got == due else f"evaluated {got}, not {due}"


def main() -> int:
    args = read_flags(__doc__.splitlines()[0], "run")
    ranks, counts, refusals, shares = Ranks(RANKS), Counter[str](), Counter[str](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for again, random in numbered(args):
            case = draw(random)
            wrong = check(ranks, case, folder, shares)
            counts["runs"] += 1
            if wrong.startswith("refused: "):
                refusals[wrong] += 1
            elif wrong:
                counts["failed"] += 1
                print(f"{again}: {wrong}: {case}", flush=True)
    ranks.close()
    for why, count in refusals.most_common():
        print(f"{count} {why}")
    if shares:
        print(f"differences are at most {max(shares):.1f} times those of other orders of summation")
    print(f"{counts['runs']} runs, {refusals.total()} refused, {counts['failed']} failed")
    return int(counts["failed"] > 0 or 2 * refusals.total() > counts["runs"])


if __name__ == "__main__":
    sys.exit(main())
