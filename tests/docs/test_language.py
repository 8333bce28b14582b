"""The documentation uses the field's words: phrases that were translated word by word do not come back."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BANNED = {  # a pattern of prose, and what to write
    r"\bshar(e|es|ed|ing) out\b": "sharded",
    r"\bgo(es)? on (from|with)\b": "resume, continue",
    r"\b(flies|flying)\b": "overlaps",
    r"\bholds? nobody up\b": "does not delay",
    r"\bnobody (types|moves)\b": "say that it is not needed",
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
}


def prose(page: Path) -> str:
    """A page without code, on one line: a phrase may cross lines."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return " ".join(re.sub(r"`[^`]*`", "`code`", text).split())


PAGES = {
    str(path.relative_to(ROOT)): prose(path)
    for folder in ("docs", "examples")
    for path in ROOT.glob(f"{folder}/**/*.md")
}


@pytest.mark.parametrize("pattern", BANNED)
def test_phrases_that_do_not_come_back(pattern):
    found = [f"{page}: {match[0]}" for page, text in PAGES.items() for match in re.finditer(pattern, text)]
    assert not found, f"write: {BANNED[pattern]}"


def test_the_patterns_find_the_phrases():
    said = "Ranks share out weights and go on from a checkpoint. Saved are outputs. A flag does not go with another."
    assert sum(bool(re.search(pattern, said)) for pattern in BANNED) == 4
