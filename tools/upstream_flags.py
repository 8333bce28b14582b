"""Writes docs/upstream_flags.md from the table of Megatron-LM's flags: python tools/upstream_flags.py"""

from pathlib import Path

from megatron.context_parallel.trainer.config.upstream_flags import GIVE_INSTEAD, MEANS_NOTHING

PAGE = Path(__file__).parents[1] / "docs" / "upstream_flags.md"
_HEAD = """# Flags of Megatron-LM

The flags of `pretrain_gpt.py` have Megatron's names and meanings; `--help all` lists them. This page lists flags of
Megatron-LM that are not among them. Capitals stand for any value, dots for several. Other words are the only values
that are accepted.

Every flag of Megatron-LM's example scripts for GPT-3 and Llama 3 is one of ours or on this page. It is written by
`tools/upstream_flags.py`.
"""
_NOTHING = """
## Mean nothing here

These are accepted, because the result does not depend on them. The first rank says so in one line.
"""
_INSTEAD = """
## Refused

These would change the result, or what is read. The run stops with a line that says what to give instead. A flag that is
neither here nor in `--help all` is refused too, with the flag that is spelled most like it.
"""


def page() -> str:
    """The text of the page."""
    nothing, instead = _table("why", MEANS_NOTHING), _table("instead", GIVE_INSTEAD)
    return _HEAD + _NOTHING + nothing + _INSTEAD + instead


def _table(title: str, flags: dict[str, str]) -> str:
    by_reason: dict[str, list[str]] = {}
    for usage, says in flags.items():
        by_reason.setdefault(says, []).append(f"`{usage}`")
    rows = [f"| {', '.join(usages)} | {says} |" for says, usages in by_reason.items()]
    return "\n".join(["", f"| flags | {title} |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
