"""Mutants of the core and of inference: do the tests detect one changed place? This is not part of the test run.

    python -m tests.campaigns.mutants --count 300 --seed 0 --processes 1 --results mutants.txt

Each mutant changes one place of one module: a comparison, operator, constant or condition, or a statement left out.
First, every test of these modules runs once, to record its lines and its time. Then the tests of a module that run the
changed line run on each mutant, the quickest first, in a fork of a process that has collected all tests. A mutant is
killed if a test fails or does not end.
"""

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path

import matplotlib  # noqa: F401  what tests import is loaded once, here
import numpy  # noqa: F401
import pytest
import torch
from megatron.core import parallel_state  # noqa: F401

from tests.campaigns.mutants.code import PACKAGE, Mutant, mutate, places, put, tree_of

ROOT = Path(__file__).parents[3]
LONGEST = 2  # seconds of CPU time; tests that take longer are left out
LONG_ENOUGH = 20  # seconds of tests that a mutant meets at most
SLOWER, MORE = 5, 15  # a test does not end if it takes so many times what it takes without a mutant, and seconds more
EXACT = "attention/test_exact.py::test_float64_leaves_no_room_for_error"
PLANS = (
    "plan/test_form.py",
    "plan/test_machine.py",
    "plan/test_volume.py",
    "strategies/test_strategies.py",
    "plan/test_plan.py",
    "attention/test_guards.py",
)
PLANS += ("strategies/test_lightseq.py", "runtime/test_heads.py")
ATTENTION = (
    "attention/test_guards.py",
    EXACT,
    "attention/test_corners.py",
    "tokens/test_mask.py",
    "runtime/test_heads.py",
)
ROWS = "tokens/test_placement.py", "tokens/test_mask.py", "attention/test_corners.py"
FLAGS = ("-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist")
RANKS = (  # of `TorchTransport`, between processes
    "runtime/test_transport.py::test_torch_transport",
    "attention/test_gloo.py::test_exact_between_processes[2-4-4]",
    "runtime/test_communicators.py::test_nccl_connects_each_communicator_on_the_current_device",
    "runtime/test_communicators.py::test_a_rank_outside_the_group_is_told",
    "runtime/test_communicators.py::test_one_made_after_another_has_communicators_of_its_own",
)
TESTS = {
    "plan/ir.py": (*PLANS, EXACT),
    "plan/form.py": PLANS,
    "plan/machine.py": (*PLANS, "cluster/test_simulate.py"),
    "plan/flows.py": (*PLANS, "cluster/test_simulate.py"),
    "plan/trace.py": (*PLANS, "cluster/test_simulate.py"),
    "plan/schedule.py": (*PLANS, *ATTENTION),
    "plan/verify.py": PLANS,
    "plan/liveness.py": PLANS,
    "plan/volume.py": PLANS,
    "plan/row_sets.py": ("plan/test_volume.py", *ROWS),
    "runtime/executor.py": ATTENTION,
    "runtime/rank_rows.py": ROWS,
    "runtime/rounds.py": ("attention/test_corners.py", "runtime/test_heads.py"),
    "runtime/buffers.py": ATTENTION,
    "tokens/chunk_pairs.py": (
        "tokens/test_mask.py",
        "strategies/test_strategies.py",
        "attention/test_corners.py",
        "plan/test_plan.py",
    ),
    "tokens/mask.py": (*ROWS, "strategies/test_strategies.py", "plan/test_plan.py"),
    "tokens/documents.py": (*ROWS, "tokens/test_rows.py"),
    "tokens/slices.py": ROWS,
    "tokens/layout.py": (
        "tokens/test_layout.py",
        "tokens/test_mask.py",
        "attention/test_corners.py",
        "runtime/test_heads.py",
    ),
    "runtime/head_swap.py": ("attention/test_corners.py", "runtime/test_heads.py"),
    "runtime/comm/transport.py": (
        "runtime/test_transport.py",
        "attention/test_guards.py",
        EXACT,
        "plan/test_plan.py",
        "runtime/test_heads.py",
        *RANKS,
    ),
    "inference/pages.py": ("inference/test_pages.py", "generation/test_generate.py"),
    "inference/choose.py": ("inference/test_choose_prefill.py",),
    "inference/sampling.py": ("generation/test_generate.py",),
    "inference/text_stream.py": ("generation/test_generate.py",),
    "inference/prefixes.py": ("generation/test_generate.py",),
    "inference/engine.py": ("generation/test_generate.py",),
}
Mutation = tuple[str, int]  # a module, and the number of a place in it


class Lines:
    """Which lines of the core this process runs."""

    def __init__(self) -> None:
        self.seen: dict[str, set[int]] = defaultdict(set)
        self.begin()

    def begin(self) -> None:
        sys.settrace(self._call)

    def end(self) -> dict[str, list[int]]:
        """The lines of each module that ran since the last call."""
        sys.settrace(None)
        noted = {module: sorted(lines) for module, lines in self.seen.items()}
        self.seen.clear()
        return noted

    def _call(self, frame, event, arg):
        file = frame.f_code.co_filename
        return self._line if file.startswith(PACKAGE) and file[len(PACKAGE) :] in TESTS else None

    def _line(self, frame, event, arg):
        self.seen[frame.f_code.co_filename[len(PACKAGE) :]].add(frame.f_lineno)
        return self._line


class Campaign:
    """A plugin that runs the collected tests not once but for each mutant, in a process of its own."""

    def __init__(self, todo: list[Mutation], processes: int, results: Path) -> None:
        self.todo, self.processes, self.results = todo, processes, results
        self.tests: dict[str, tuple[float, dict[str, list[int]] | None]] = {}  # of each its seconds and lines
        self.running: dict[int, tuple[Mutation, str]] = {}  # of each process its mutant
        self.lines, self.learning = Lines(), False

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list) -> None:
        """Leaves out tests that start many processes."""
        named = {f"tests/{name}" for name in RANKS}
        left = {  # once each
            item.nodeid: item
            for item in items
            if "pool" not in item.fixturenames
            if "ranks" not in item.fixturenames or item.nodeid in named
        }
        items[:] = left.values()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session) -> bool | None:
        """Returns True in this process. Its forks do not return; they run the tests that they are given."""
        self.imported, items = self.lines.end(), session.items
        self.note = Path(tempfile.mkstemp()[1])
        if not (child := _fork()):
            self.learning = True
            signal.signal(signal.SIGPROF, lambda *_: pytest.skip("takes too long"))
            return None
        if os.waitpid(child, 0)[1]:
            sys.exit("the tests fail without a mutant")
        _end(child)
        self.tests = json.loads(self.note.read_text())
        self.note.unlink()
        print(f"{len(self.tests)} tests pass without a mutant", flush=True)
        for mutation in self.todo:
            mutant = mutate(*mutation)
            chosen = self.tests_of(mutation[0], mutant.lines)
            if not chosen:
                self.write("survives", mutation, f"{mutant.said} (no test runs it)")
                continue
            if not (child := _fork()):
                if mutant.function:
                    put(mutant, importlib.import_module(_name(mutation[0])))
                else:
                    signal.alarm(4 * MORE + int(SLOWER * sum(self.tests[test][0] for test in chosen)))
                    _again(mutation[0], mutant, chosen)
                session.items = sorted((i for i in items if i.nodeid in chosen), key=lambda i: chosen.index(i.nodeid))
                return None
            self.running[child] = mutation, mutant.said
            self.wait(self.processes - 1)
        self.wait(0)
        return True

    def tests_of(self, module: str, lines: range) -> list[str]:
        """The quickest tests of the module that run one of the lines; of all of them if an import runs it."""
        of_all = {*self.imported.get(module, ())} & {*lines}
        chosen = [
            test
            for test, (_, seen) in self.tests.items()
            if test.removeprefix("tests/").startswith(TESTS[module])
            if of_all or seen is None or {*seen.get(module, ())} & {*lines}
        ]
        chosen.sort(key=lambda test: self.tests[test][0])
        times = accumulate(self.tests[test][0] for test in chosen)
        return [test for test, seconds in zip(chosen, times, strict=True) if seconds < LONG_ENOUGH]

    def wait(self, most: int) -> None:
        """Waits until at most this many processes run."""
        while len(self.running) > most:
            time.sleep(0.02)
            for child, (mutation, said) in list(self.running.items()):
                ended, status = os.waitpid(child, os.WNOHANG)
                if ended:
                    _end(child)
                    del self.running[child]
                    hangs = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
                    self.write("killed" if status else "survives", mutation, said + " (does not end)" * hangs)

    def write(self, verdict: str, mutation: Mutation, said: str) -> None:
        with self.results.open("a") as results:
            print(verdict, *mutation, said, file=results)
        if verdict == "survives":
            print(f"survives: {said}", flush=True)

    # -- in a fork ---------------------------------------------------------------------------------------------

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item) -> Iterator[None]:
        if not self.learning:
            signal.alarm(MORE + int(SLOWER * self.tests[item.nodeid][0]))  # it ends this process
            yield
            return
        for module in [m for name, m in sys.modules.items() if name.startswith("megatron.context_parallel")]:
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
        started = time.monotonic()
        self.lines.begin()
        signal.setitimer(signal.ITIMER_PROF, LONGEST)
        outcome = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        lines = self.lines.end()
        if not outcome.excinfo:  # what other processes run is not seen: it may be all
            self.tests[item.nodeid] = time.monotonic() - started, None if "ranks" in item.fixturenames else lines

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report) -> None:
        if report.failed:
            os._exit(1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, nextitem) -> None:
        if nextitem is None and self.learning:
            self.note.write_text(json.dumps(self.tests))
        if nextitem is None:
            os._exit(0)


def _fork() -> int:
    """As `os.fork`; the new process has a group of its own, and ranks that it starts are forks of it."""
    child = os.fork()
    if not child:
        os.setsid()
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        torch.set_num_threads(1)
        multiprocessing.get_context = lambda _: get_context("fork")
    return child


def _end(child: int) -> None:
    """Ends a process, and those that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


def _name(module: str) -> str:
    return f"megatron.context_parallel.{module.removesuffix('.py').replace('/', '.')}"


def _again(module: str, mutant: Mutant, chosen: list[str]) -> None:
    """Loads the core and its tests again with the mutant, runs the chosen tests, and ends this process."""
    for name in [*sys.modules]:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if name != "__main__" and file.startswith((PACKAGE, f"{ROOT}/tests/")):
            del sys.modules[name]
    original = SourceFileLoader.get_code
    SourceFileLoader.get_code = lambda loader, name: mutant.code if name == _name(module) else original(loader, name)
    os._exit(int(pytest.main([*FLAGS, "-x", *chosen])))


# -- the command ----------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modules", nargs="+", choices=TESTS, default=[*TESTS], help="default: all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--results", type=Path, default="mutants.txt", help="a line a mutant; skips those in it")
    args = parser.parse_args()
    every = [(module, i) for module in args.modules for i, _ in enumerate(places(tree_of(module)))]
    chosen = random.Random(args.seed).sample(every, min(args.count, len(every)))
    args.results = args.results.resolve()
    args.results.touch()
    done = {tuple(line.split(maxsplit=3)[1:3]) for line in args.results.read_text().splitlines()}
    todo = [(module, number) for module, number in chosen if (module, str(number)) not in done]
    os.chdir(ROOT)
    tests = sorted({f"tests/{test}" for module in args.modules for test in TESTS[module]})
    if failed := pytest.main([*FLAGS, *tests], plugins=[Campaign(todo, args.processes, args.results)]):
        return int(failed)
    report(args.results, chosen, len(every))
    return 0


def report(results: Path, chosen: list[Mutation], every: int) -> None:
    """How many of the chosen mutants were killed, by module."""
    tried, killed = Counter(), Counter()
    for line in results.read_text().splitlines():
        verdict, module, number = line.split(maxsplit=3)[:3]
        if (module, int(number)) in chosen:
            tried[module] += 1
            killed[module] += verdict == "killed"
    for module, count in sorted(tried.items()):
        print(f"{module:20} {killed[module]:4} of {count:4} killed")
    print(f"{killed.total()} of {tried.total()} killed ({killed.total() / tried.total():.1%}), of {every} mutants")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
