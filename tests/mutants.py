"""Mutants of the core: would the tests notice one changed place? A command of its own, not a part of the test run.

    PYTHONPATH=. python tests/mutants.py --count 300 --seed 0 --processes 2

Each mutant changes one place of one module: a comparison, operator, constant or condition, or a statement left out.
The tests of that module then run in a fork of a warm process. A mutant is killed if a test fails or they do not end.
"""

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import matplotlib  # noqa: F401  what tests import is loaded once, here
import numpy  # noqa: F401
import pytest
import torch
from megatron.core import parallel_state  # noqa: F401

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron/context_parallel"
SLOWER = 5  # times what the tests take without a mutant: then they do not end
EXACT = "test_exact.py::test_float64_leaves_no_room_for_error"
PLANS = ("test_form.py", "test_strategies.py", "test_plan.py", "test_guards.py", "test_lightseq.py")
ATTENTION = ("test_guards.py", EXACT, "test_corners.py", "test_mask.py")
TESTS = {  # of each module, the most telling first; those that need other processes are left out
    "plan/ir.py": (*PLANS, "test_heads.py::test_examples_of_placement", EXACT),
    "plan/form.py": PLANS,
    "plan/machine.py": PLANS,
    "plan/trace.py": PLANS,
    "plan/verify.py": PLANS,
    "plan/liveness.py": PLANS,
    "plan/volume.py": (*PLANS, "test_heads.py"),
    "executor.py": ATTENTION,
    "pairs.py": ("test_mask.py", "test_strategies.py", "test_corners.py"),
    "mask.py": ("test_mask.py", "test_strategies.py", "test_corners.py"),
    "layout.py": ("test_layout.py", "test_mask.py", "test_corners.py"),
    "heads.py": ("test_corners.py", "test_heads.py"),
    "transport.py": ("test_guards.py", EXACT, "test_plan.py"),
}
COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARE |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
BINARY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
BINARY |= {ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift}  # `|` is of types, mostly
usual: dict[tuple[str, ...], float] = {}  # seconds that tests take without a mutant
LEFT_OUT = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise)


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """(node, change) of all mutants of a module; docstrings and error texts are none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARE:
            yield node, "compare"
        elif (
            isinstance(node, ast.BinOp)
            and type(node.op) in BINARY
            and not isinstance(node.left, ast.Constant | ast.Name)
        ):
            yield node, "operate"
        elif isinstance(node, ast.BoolOp):
            yield node, "and or"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, "constant"
        elif isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node, "never"
            yield node, "always"
        if isinstance(node, LEFT_OUT) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield node, "left out"


def change(node: ast.AST, how: str) -> ast.AST:
    """The node, changed."""
    match how:
        case "compare":
            node.ops[0] = COMPARE[type(node.ops[0])]()
        case "operate":
            node.op = BINARY[type(node.op)]()
        case "and or":
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case "constant":
            node.value += 1
        case "never" | "always":
            node.test = ast.Constant(how == "always")
        case "left out":
            return ast.copy_location(ast.Pass(), node)
    return node


class _At(ast.NodeTransformer):
    """Changes the nth place of a module."""

    def __init__(self, target: ast.AST, how: str) -> None:
        self.target, self.how = target, how

    def visit(self, node: ast.AST) -> ast.AST:
        return change(node, self.how) if node is self.target else super().visit(node)


def mutants() -> list[tuple[str, int]]:
    """(module, number of the place) of all there are."""
    return [(module, i) for module in TESTS for i, _ in enumerate(places(_tree(module)))]


def _tree(module: str) -> ast.Module:
    return ast.parse((ROOT / PACKAGE / module).read_text())


def mutate(module: str, number: int) -> tuple[str, str]:
    """The source of a mutant, and what was changed."""
    tree = _tree(module)
    node, how = list(places(tree))[number]
    said = f"{module}:{node.lineno}: {how}: {ast.unparse(node).splitlines()[0][:90]}"
    return ast.unparse(ast.fix_missing_locations(_At(node, how).visit(tree))), said


class _InProcess:
    """Leaves out tests that start processes, and drawings."""

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list) -> None:
        slow = "ranks", "pool"
        items[:] = [item for item in items if not {*slow} & {*item.fixturenames} and "page" not in item.name]


def survives(mutant: tuple[str, int]) -> str:
    """What was changed if all tests pass with it, else nothing; in a process of its own."""
    module, number = mutant
    source, said = mutate(module, number)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / PACKAGE, Path(folder) / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
        (Path(folder) / PACKAGE / module).write_text(source)
        child = os.fork()
        if not child:
            _run(folder, module)
        limit = time.monotonic() + SLOWER * usual[TESTS[module]]
        while time.monotonic() < limit:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return said if status == 0 else ""
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return ""


def _run(folder: str, module: str) -> None:
    os.setsid()
    sys.path[:] = [folder, *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    os.environ["PYTHONPATH"] = folder
    os.chdir(ROOT)
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    files = [f"tests/{name}" for name in TESTS[module]]
    flags = ["-x", "-q", "-o", "pythonpath=", "-p", "no:cacheprovider", "-p", "no:xdist"]
    os._exit(int(pytest.main([*flags, *files], plugins=[_InProcess()])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after; default: never")
    args = parser.parse_args()
    for module, tests in TESTS.items():
        if tests not in usual:
            usual[tests] = seconds_unchanged(module)
            print(f"without a mutant: {usual[tests]:4.0f} s for {module}", flush=True)
    every = mutants()
    chosen = random.Random(args.seed).sample(every, min(args.count, len(every)))
    started, tried, killed = time.monotonic(), Counter(), Counter()
    with get_context("fork").Pool(args.processes) as pool:
        for (module, _), survivor in zip(chosen, pool.imap(survives, chosen), strict=False):
            tried[module] += 1
            killed[module] += not survivor
            if survivor:
                print(f"survives: {survivor}", flush=True)
            if time.monotonic() - started > args.seconds:
                break
        pool.terminate()
    for module, count in sorted(tried.items()):
        print(f"{module:20} {killed[module]:4} of {count:4} killed")
    print(f"{killed.total()} of {tried.total()} killed ({killed.total() / tried.total():.1%}), of {len(every)} mutants")
    return 0


def seconds_unchanged(module: str) -> float:
    """How long the tests of a module take as it is; they must pass."""
    started, child = time.monotonic(), os.fork()
    if not child:
        _run(str(ROOT), module)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"the tests of {module} fail without a mutant")
    return time.monotonic() - started


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
