"""Documentation, help, messages and docstrings use the field's words: phrases translated word by word stay away."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = {  # a pattern of prose, and what to write
    r"\bshar(e|es|ed|ing) out\b": "sharded",
    r"\bgo(es|ing)? on (from|with|after)\b": "resume, continue",
    r"\b(flies|flying)\b": "overlaps",
    r"\bholds? nobody up\b": "does not delay",
    r"\bnobody (types|moves|sees)\b": "no query sees, is not needed",
    r"\b(go|goes|come|comes|way) home\b": "returns to its owner",
    r"\bcontradicts itself in\b": "contradictions in the paper",
    r"\bof what is (drawn|kept|sent)\b": "name the thing",
    r"\b(how|what|for) (much|many|that);": "a sentence with a verb",
    r"\bround (a|an|the|its|groups)\b": "around",
    r"\bmeans? nothing here\b": "is accepted, but has no effect",
    r"\bknows? no\b": "does not support, does not contain",
    r"\bdo(es)? not go with\b": "cannot be combined with",
    r"\bRefused, each with\b": "These are refused with",
    r"(^|\. )(Saved|Rejected|Refused|Predicted|Measured|Written) (is|are)\b": "subject first",
    r"\ba second and GPU\b": "per second per GPU",
    r"\bfor ever\b": "forever",
    r"\b(adds?|compares?|says?|tells?|shows?) (\w+ )?to what an?\b": "name the thing",
    r"\bnot claimed\b": "not supported",
    r"\boutlook\b": "lower bound, estimate",
    r"\bunder way\b": "in flight",
    r"\bfree some room\b": "free some space",
    r"\bwithout a word\b": "without a message",
    r"\bof Megatron-LM, not here\b": "a flag of Megatron-LM that is not supported",
    r"\bfolders? of HuggingFace\b": "HuggingFace folder",
    r"\bmade up\b": "generated, mock",
    r"\bcut short\b": "truncated",
    r"\bwhat travels\b": "which tensors are sent",
    r"\b(most|many|few) likely, (is|are) at fault\b": "a likely fault of",
    r"\bin the way\b": "takes the space",
    r"\b[Ww]hat (came|became) of\b": "the outcome of",
    r"\bmeans? it no good\b": "hostile",
}


def prose(text: str) -> str:
    """A page without code, on one line: a phrase may cross lines."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return " ".join(re.sub(r"`[^`]*`", "`code`", text).split())


def strings(source: str) -> Iterator[str]:
    """The docstrings, help texts and messages of a module; a value in an f-string is a dash."""
    tree = ast.parse(source)
    within = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "-" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in within:
            yield node.value


def remarks(source: str) -> Iterator[str]:
    """The docstrings and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""
    yield from re.findall(r"(?:^|\s)(#.*)$", source, re.MULTILINE)


@pytest.fixture(scope="module")
def pages() -> dict[Path, str]:
    documents = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    found = {path: prose(path.read_text()) for path in documents}
    readers = {"megatron/context_parallel": strings, "tests": remarks}
    readers |= dict.fromkeys(("examples", "benchmarks", "tools"), strings)
    for folder, read in readers.items():
        for path in (ROOT / folder).rglob("*.py"):
            found[path] = "\n".join(map(prose, read(path.read_text())))
    return found


@pytest.mark.parametrize("pattern", BANNED)
def test_phrases_that_do_not_come_back(pages, pattern):
    compiled = re.compile(pattern, re.MULTILINE)
    found = [f"{page.relative_to(ROOT)}: {m[0]}" for page, text in pages.items() for m in compiled.finditer(text)]
    assert not found, f"write: {BANNED[pattern]}"


def test_the_patterns_find_the_phrases():
    said = "Ranks share out weights and go on from a checkpoint. Saved are outputs. A flag does not go with another."
    assert sum(bool(re.search(pattern, said)) for pattern in BANNED) == 4


def test_the_docstrings_and_comments_of_a_module_are_found():
    source = '"""A page."""\nwait = "for ever"\ndef f():\n    """It waits."""\n    return 1  # the last\n'
    assert [*remarks(source)] == ["A page.", "It waits.", "# the last"]


def test_the_strings_of_a_module_are_found():
    source = '"""A page."""\nflag("how much; or not")\nraise ValueError(f"{name}: ranks wait " f"for ever")\n'
    assert [*map(prose, strings(source))] == ["A page.", "how much; or not", "-: ranks wait for ever"]
