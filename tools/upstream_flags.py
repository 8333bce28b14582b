"""Writes docs/upstream_flags.md from the table of Megatron-LM's flags: python tools/upstream_flags.py"""

from pathlib import Path

from megatron.context_parallel.trainer.config.upstream_flags import GIVE_INSTEAD, MEANS_NOTHING

PAGE = Path(__file__).parents[1] / "docs" / "upstream_flags.md"
_HEAD = """# Flags of Megatron-LM

The flags of `pretrain_gpt.py` have Megatron's names and meanings. `--help all` lists them. This page lists the other
flags of Megatron-LM. Words in capitals stand for any value, and dots for several values. No values other than those
shown are accepted.

Every flag of Megatron-LM's example scripts for GPT-3 and Llama 3 is either a flag of `pretrain_gpt.py` or on this page.
`tools/upstream_flags.py` writes the page.
"""
_NOTHING = """
## Accepted, but without effect

The result does not depend on these flags, so they are accepted. The first rank prints one line about them.
"""
_INSTEAD = """
## Not supported

These flags would change the result, or the files that are read. The run stops and names the alternative of each. A flag
that is neither here nor in `--help all` is refused too. The error suggests the flag with the most similar spelling.
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
