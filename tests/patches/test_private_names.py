"""Only `patches/` has private names of other libraries, or replaces names of theirs."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron/context_parallel"
ELSEWHERE = ("patches/", "kernels/libraries/")  # libraries of kernels have a folder of their own
MODULES = [
    name for path in sorted(PACKAGE.rglob("*.py")) if not (name := str(path.relative_to(PACKAGE))).startswith(ELSEWHERE)
]
PYTHONS_OWN = {"_replace", "_asdict", "_exit", "_current_frames"}  # of named tuples, os, sys
NEVER = {"__globals__", "__closure__", "__code__", "mock"}  # the inside of functions; replacing for a while


def reached(tree: ast.Module) -> Iterator[str]:
    """Private names of others, and assignments to what was imported, each with its line."""
    libraries = set(_imported(tree))
    own = set(_defined(tree))
    for node in ast.walk(tree):
        for name in _named(node):
            private = name.startswith("_") and not name.startswith("__")
            if name in NEVER or (private and name not in own | PYTHONS_OWN):
                yield f"{node.lineno}: {name}"
        for target in _targets(node):
            if _root(target) in libraries:
                yield f"{node.lineno}: {ast.unparse(target)} ="
        if _is_call_of(node, "setattr", "delattr"):
            yield f"{node.lineno}: {ast.unparse(node)}"


def _imported(tree: ast.Module) -> Iterator[str]:
    """Names of what comes from other libraries than Python's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_other(alias.name):
                    yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and _is_other(node.module or "."):
            yield from (alias.asname or alias.name for alias in node.names)


def _is_other(module: str) -> bool:
    ours = module.startswith(("megatron.context_parallel", "."))
    return not ours and module.partition(".")[0] not in sys.stdlib_module_names


def _defined(tree: ast.Module) -> Iterator[str]:
    """Names that the module defines, also as attributes of its own objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and _root(node) in ("self", "cls"):
            yield node.attr


def _named(node: ast.AST) -> list[str]:
    """Names that a node asks another module or object for."""
    if isinstance(node, ast.Attribute) and _root(node) not in ("self", "cls"):
        return [node.attr]
    if isinstance(node, ast.ImportFrom) and not node.level and node.module != "__future__":
        return [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    if isinstance(node, ast.Import):
        return [part for alias in node.names for part in alias.name.split(".")]
    if _is_call_of(node, "getattr", "hasattr"):
        return [str(argument.value) for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
    return []


def _is_call_of(node: ast.AST, *functions: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions


def _targets(node: ast.AST) -> list[ast.expr]:
    """Attributes that a node assigns to or deletes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            found = targets
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            found = [target]
        case _:
            found = []
    return [target for target in found if isinstance(target, ast.Attribute)]


def _root(node: ast.expr) -> str:
    """The name that an expression such as `a.b(c).d` begins with."""
    while True:
        match node:
            case ast.Attribute(value=inner) | ast.Subscript(value=inner) | ast.Call(func=inner):
                node = inner
            case ast.Name(id=name):
                return name
            case _:
                return ""


def test_no_private_name_of_another_library():
    found = {module: [*reached(ast.parse((PACKAGE / module).read_text()))] for module in MODULES}
    assert len(found) > 200 and {module: places for module, places in found.items() if places} == {}


@pytest.mark.parametrize(
    "line,found",
    [
        ("import torch\nwith torch._C._AutoDispatchBelowAutograd(): pass", 2),
        ("from torch.distributed import distributed_c10d as c\nstore = c._get_default_store()", 1),
        ("from torch._subclasses import FakeTensorMode", 1),
        ("from megatron.core.datasets.indexed_dataset import _INDEX_HEADER", 1),
        ("from megatron.core import utils\nutils.get_batch = None", 1),
        ("import torch\nsetattr(torch, 'ones', None)", 1),
        ("from unittest import mock", 1),
        ("x = model._is_stateful", 1),
        ("x = hasattr(model.processor, '_attention_backend')", 1),
        ("names = parallelize.__globals__", 1),
        ("from megatron.context_parallel.tokens import mask\nimport os, torch\nos._exit(torch.ones(1).int())", 0),
    ],
)
def test_each_way_to_reach_in_is_found(line, found):
    assert len([*reached(ast.parse(line))]) == found
