"""Mutants of a module of the core: its source with one place changed."""

import ast
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

PACKAGE = f"{Path(__file__).parents[3]}/megatron/context_parallel/"
COMPARE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARE |= {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
BINARY = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
BINARY |= {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift}
LEFT_OUT = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise)


class Place(NamedTuple):
    """A place that can be changed: the lines of its statement, and the outermost function in whose body it is."""

    node: ast.AST
    how: str
    lines: range
    function: str


def places(tree: ast.Module) -> Iterator[Place]:
    """All mutants of a module."""
    for node, *where in _walk(tree, range(0), "", False):
        match node:
            case ast.Compare() if type(node.ops[0]) in COMPARE:
                yield Place(node, "compare", *where)
            case ast.BinOp() if type(node.op) in BINARY and not _is_type(node.left):
                yield Place(node, "operate", *where)
            case ast.BoolOp():
                yield Place(node, "and or", *where)
            case ast.Constant(value=int()) if type(node.value) is int:
                yield Place(node, "constant", *where)
            case ast.If() | ast.IfExp() | ast.While():
                yield Place(node, "never", *where)
                if not isinstance(node.test, ast.Constant):  # `while True` is always
                    yield Place(node, "always", *where)
        if isinstance(node, LEFT_OUT) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            yield Place(node, "left out", *where)


def _walk(node: ast.AST, lines: range, name: str, inside: bool) -> Iterator[tuple[ast.AST, range, str]]:
    """The nodes that can change behaviour: all except types and the texts of raised errors."""
    if isinstance(node, ast.stmt):
        body = getattr(node, "body", None)
        lines = range(node.lineno, max(node.lineno + 1, body[0].lineno if body else node.end_lineno + 1))
    yield node, lines, name if inside else ""
    named = isinstance(node, ast.ClassDef | ast.FunctionDef) and not inside
    within = f"{name}.{node.name}".lstrip(".") if named else name
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns") and not isinstance(node, ast.Raise):
            enters = inside or (field == "body" and isinstance(node, ast.FunctionDef))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _walk(child, lines, within, enters)


def _is_type(node: ast.AST) -> bool:
    """`Send` in `Send | Recv`, and `Send | Recv` in a longer one."""
    if isinstance(node, ast.BinOp):
        return _is_type(node.left)
    return isinstance(node, ast.Name) and node.id[0].isupper() and not node.id.isupper()


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


def tree_of(module: str) -> ast.Module:
    return ast.parse(Path(PACKAGE + module).read_text())


class Mutant(NamedTuple):
    said: str  # what was changed
    code: CodeType  # of the whole module
    lines: range  # of the changed statement
    function: str  # the only one that differs; empty if it is code that an import runs


def mutate(module: str, number: int) -> Mutant:
    """The mutant of a place of a module."""
    tree = tree_of(module)
    node, how, lines, function = list(places(tree))[number]
    said = f"{module}:{node.lineno}: {how}: {ast.unparse(node).splitlines()[0][:90]}"
    changed = ast.fix_missing_locations(_At(node, how).visit(tree))
    return Mutant(said, compile(changed, PACKAGE + module, "exec"), lines, function)


def put(mutant: Mutant, module: ModuleType) -> None:
    """Replaces the code of the loaded function with that of the mutant."""
    *classes, name = mutant.function.split(".")
    found: object = vars(reduce(getattr, classes, module))[name]
    for inner in ("fget", "func", "__func__", "__wrapped__"):  # properties, cached ones, class methods, caches
        found = getattr(found, inner, found)
    found.__code__ = _code_of(mutant.code, mutant.function)


def _code_of(code: CodeType, name: str) -> CodeType:
    inner = [c for c in code.co_consts if isinstance(c, CodeType)]
    return next((c for c in inner if c.co_qualname == name), None) or next(
        _code_of(c, name) for c in inner if name.startswith(f"{c.co_qualname}.")
    )
