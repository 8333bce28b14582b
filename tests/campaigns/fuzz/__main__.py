"""Random cases against attention by its definition, for a given time.

    python -m tests.campaigns.fuzz --seconds 60 --seed 1
    python -m tests.campaigns.fuzz --case '<what a failure printed>'

Every third case runs on gloo ranks, the others with all ranks in this process. On a pretended GPU all run on ranks.
Exit status 1 if a case failed.
"""

import argparse
import sys
import time
from collections import Counter, defaultdict
from random import Random

import torch

from megatron.context_parallel import UsageError
from tests.campaigns.fuzz.case import IN_PROCESS, MUTATION, ON_RANKS, Case, draw, from_json, to_json
from tests.campaigns.fuzz.oracle import WHAT, answers, excess
from tests.campaigns.fuzz.ranks import Failure, Pool, run

IN_PROCESS_RANKS = 12
MOST_REFUSED = 0.1  # of all cases; with more, the generator draws too many invalid cases


class Fuzz:
    """Runs cases and records their outcomes."""

    def __init__(self, ranks: int) -> None:
        self.pool, self.ranks = Pool(ranks), ranks
        self.last_refusal = ""
        self.came: Counter[str] = Counter()  # passed, failed, refused
        self.calls: Counter[tuple] = Counter()  # by strategy and dtype
        self.worst: dict[tuple, list[float]] = defaultdict(lambda: [0.0] * len(WHAT))  # shares of what is allowed

    def draw(self, seed: int, i: int) -> Case:
        """Case i of a seed."""
        random = Random(f"{seed} {i}")
        if self.ranks and (i % 3 == 2 or torch.cuda.is_available()):
            return draw(random, ON_RANKS, self.ranks)
        return draw(random, MUTATION if i % 6 == 4 else IN_PROCESS, IN_PROCESS_RANKS)

    def check(self, case: Case) -> str | None:
        """The error of a case, or None."""
        try:
            wrong = self._compare(case)
        except UsageError as error:
            self.came["refused"] += 1
            self.last_refusal = f"{error}: {to_json(case)}"
            return None
        except Failure as error:
            wrong = str(error)
        self.came["failed" if wrong else "passed"] += 1
        return wrong

    def _compare(self, case: Case) -> str | None:
        wrong = []
        of_groups = run(case, self.pool)
        narrow = case.options.get("partials_in_16_bits") or "partials_in_16_bits" in case.strategy
        sent_narrow = case.n if narrow else 0
        for i, call in enumerate(case.calls if of_groups else ()):
            key = case.strategy, call.dtype
            self.calls[key] += 1
            for j, answer in enumerate(answers(call)):
                found = [results[i][j] for results in of_groups if results[i][j] is not None]
                for off in (excess(call, WHAT[j], answer, x, sent_narrow) for x in found):
                    if off <= 1:
                        self.worst[key][j] = max(self.worst[key][j], off)
                    else:
                        wrong.append(f"{WHAT[j]} of call {i} is off by {off:.3g} times what is allowed")
        return "; ".join(wrong) or None

    def show(self, case: Case) -> None:
        """Checks a case. A failing case is printed as one line that runs it again."""
        if wrong := self.check(case):
            print(f"python -m tests.campaigns.fuzz --case '{to_json(case)}'  # {wrong}", flush=True)

    def report(self) -> int:
        """Prints the outcomes of all cases; returns the exit status."""
        print(self.table())
        print(", ".join(f"{self.came[what]} {what}" for what in ("passed", "failed", "refused")))
        too_many = self.came["refused"] > MOST_REFUSED * max(10, sum(self.came.values()))
        if too_many:
            print(f"too many refused, the last one: {self.last_refusal}")
        return int(too_many or self.came["failed"] > 0)

    def table(self) -> str:
        """By strategy and dtype the largest errors."""
        lines = ["largest errors of calls that passed, as shares of what is allowed"]
        width = 2 + max(map(len, ["strategy", *(name for name, _ in self.calls)]))
        lines += [f"{'strategy':{width}}{'dtype':10}{'calls':>6}  " + "".join(f"{what:>8}" for what in WHAT)]
        for key in sorted(self.calls):
            errors = "".join(f"{share:8.2f}" for share in self.worst[key])
            lines.append(f"{key[0]:{width}}{key[1]:10}{self.calls[key]:6}  {errors}")
        return "\n".join(lines)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=4, help="gloo ranks for every third case; 0: none; default: 4")
    parser.add_argument("--case", help="only this one, as a failure printed it")
    args = parser.parse_args(argv)
    if args.ranks < 0:
        parser.error(f"--ranks {args.ranks}: give how many processes may run a case, such as 4, or 0 for none")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    torch.set_num_threads(1)
    case = from_json(args.case) if args.case else None
    fuzz = Fuzz(case.n * case.groups if case else args.ranks)
    until, i = time.monotonic() + args.seconds, 0
    while i == 0 or (not case and time.monotonic() < until):
        fuzz.show(case or fuzz.draw(args.seed, i))
        i += 1
    fuzz.pool.stop()
    return fuzz.report()


if __name__ == "__main__":
    sys.exit(main())
