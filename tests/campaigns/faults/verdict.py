"""The expected and the actual outcome of an injected fault."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from .bench import LAYOUTS, Bench, Reference, losses
from .job import Outcome
from .moments import Moment

SECONDS = 10.0  # in which all ranks end after a death
MOST_LINES = 4  # after one fault, over all ranks
DETECTED, NAMED, WITHIN, LOST = "not detected", "not named", "too late", "lost"


@dataclass
class Case:
    """One injection: its number and its random choices."""

    number: int
    bench: Bench
    layout: str
    random: Random
    wrong: list[tuple[str, str]] = field(default_factory=list)  # (which expectation, what happened instead)
    what: str = ""  # what was injected
    injected: bool = False

    @property
    def ranks(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def reference(self) -> Reference:
        return self.bench.reference(self.layout)

    def expect(self, what: str, holds: object, instead: str) -> None:
        if not holds:
            self.wrong.append((what, instead))

    def draw_moment(self, *phases: str, first: int = 1) -> tuple[Moment, int]:
        """A random event of one of these phases, with equal probability for each phase, and a rank that has it."""
        while True:
            rank = self.random.randrange(self.ranks)
            phase = self.random.choice(phases)
            events = self.reference.events[rank]
            iterations = [k for name, k in events if name == phase and (k >= first or k == 0)]
            if iterations:
                iteration = self.random.choice(iterations)
                return Moment(phase, iteration, self.random.randrange(events[phase, iteration])), rank

    def strike(self, what: str, outcome: Outcome) -> None:
        """Note that the fault happened in this run."""
        self.what = f"{self.layout}: {what}"
        self.injected = outcome.fired is not None
        self.expect(DETECTED, self.injected, f"the moment did not come\n{outcome.text}")


def ended_in_time(case: Case, outcome: Outcome, bound: float = SECONDS) -> None:
    """All ranks ended within the bound, and left nothing running."""
    if outcome.fired is None:
        return
    late = f"ranks {sorted(outcome.late)} still ran" if outcome.late else f"{outcome.seconds:.1f} s after the fault"
    case.expect(WITHIN, not outcome.late and outcome.seconds <= bound, f"{late}, {bound:.0f} s are promised")
    case.expect(WITHIN, not outcome.left, f"left running: {outcome.left}")


def all_failed(case: Case, outcome: Outcome, but: int | None = None) -> None:
    """No rank ended with status 0."""
    statuses = {rank: status for rank, status in outcome.statuses.items() if rank != but}
    case.expect(DETECTED, all(statuses.values()), f"exit statuses {outcome.statuses}")


def all_well(case: Case, outcome: Outcome) -> None:
    """Every rank ended with status 0."""
    good = set(outcome.statuses.values()) == {0} and not outcome.late
    case.expect(DETECTED, good, f"exit statuses {outcome.statuses}\n{outcome.text}")
    case.expect(WITHIN, not outcome.left, f"left running: {outcome.left}")


def first_line(case: Case, outcome: Outcome, *wanted: str) -> None:
    """The first line after the fault has all of these regular expressions; few lines follow, and no traceback."""
    lines = outcome.after
    first = lines[0].text if lines else "nothing at all"
    missing = [pattern for pattern in wanted if not re.search(pattern, first)]
    case.expect(NAMED, lines and not missing, f"no {' and no '.join(missing)} in the first line: {first[:300]}")
    few_lines(case, outcome)


def few_lines(case: Case, outcome: Outcome, most: int = MOST_LINES) -> None:
    """One event prints one line for each cause."""
    lines = outcome.after
    traces = any("Traceback" in line.text for line in lines)
    case.expect(NAMED, len(lines) <= most, f"{len(lines)} lines" + (", with a traceback" if traces else ""))


def names_rank(victim: int) -> str:
    """A pattern of lines whose first rank is this one."""
    return rf"^(?:(?!rank \d).)*rank {victim}\b"


def resumes(case: Case, save: Path, before: Outcome | None = None, more: str = "") -> None:
    """The same command resumes from the newest complete checkpoint and has the numbers of the undisturbed run."""
    announced = (
        [int(n) for line in before.lines for n in re.findall(r"saved iteration (\d+)", line.text)] if before else []
    )
    again = case.bench.run(case.layout, save, more=more)
    begun = [int(n) for line in again.lines for n in re.findall(r"resuming after iteration (\d+)", line.text)]
    case.expect(LOST, set(again.statuses.values()) == {0}, f"cannot be resumed: {_tail(again)}")
    case.expect(LOST, max(announced, default=0) <= max(begun, default=0), f"saved {announced}, resumed at {begun}")
    if set(again.statuses.values()) == {0}:
        case.expect(LOST, losses(save) == case.reference.losses, f"other losses after resuming at {begun}")


def refused_or_right(case: Case, outcome: Outcome, save: Path, *wanted: str, near: float = 0.0) -> bool:
    """The damage is refused in one line that has `wanted`, or has no effect. Returns whether it was refused."""
    statuses = set(outcome.statuses.values())
    if statuses == {0}:
        same = losses(save) == case.reference.losses if not near else near_losses(case, save, near)
        case.expect(LOST, same, "accepted, with other losses")
        return False
    case.expect(DETECTED, outcome.statuses.get(0) == 2, f"exit statuses {outcome.statuses}")
    lines = [line.text for line in outcome.lines if ": error: " in line.text]
    one = len(lines) == 1 and not any("Traceback" in line.text for line in outcome.lines)
    case.expect(NAMED, one, f"{len(outcome.lines)} lines, not one: {_tail(outcome)}")
    missing = [pattern for pattern in wanted if one and not re.search(pattern, lines[0])]
    case.expect(NAMED, not missing, f"no {' and no '.join(missing)} in: {lines[:1]}")
    return True


def near_losses(case: Case, save: Path, near: float) -> bool:
    """The losses, all of them, are those of the undisturbed run to within `near`."""
    ours, theirs = losses(save), case.reference.losses
    pairs = zip(ours, theirs, strict=False)
    keys = ("lm_loss", "valid_loss", "test_loss")
    return len(ours) == len(theirs) and all(
        abs(mine[key] - own[key]) <= near * abs(own[key]) for mine, own in pairs for key in keys if key in own
    )


def _tail(outcome: Outcome) -> str:
    texts = [line.text for line in outcome.lines]
    return " / ".join(texts[-3:])[-500:]


Injection = Callable[[Case], None]
