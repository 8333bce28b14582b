"""Writes the tables of docs/serving.md from the code: the fields of requests. With --check it only compares."""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.page import table_of, write_table
from megatron.context_parallel.serving.fields import IGNORED, NEUTRAL
from megatron.context_parallel.serving.protocol import Chat, Completion, Detokenize, Tokenize

PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
SCRIPT = "tools/make_fields_table.py"
KINDS = {"completions": Completion, "chat": Chat, "tokenize": Tokenize, "detokenize": Detokenize}


def table() -> list[str]:
    """A line for each field: those that have an effect, those without one, and those with neutral values only."""
    lines = ["", "| field | requests | values |", "|---|---|---|"]
    names = list(dict.fromkeys(name for kind in KINDS.values() for name in kind.model_fields))
    for name in names:
        kinds = dict[str, list[str]]()
        for title, kind in KINDS.items():
            if name in kind.model_fields:
                kinds.setdefault(str(kind.model_fields[name].description), []).append(title)
        lines += [f"| `{name}` | {', '.join(titles)} | {values} |" for values, titles in kinds.items()]
    lines += ["", "| accepted, without effect on the text |", "|---|"]
    lines += [f"| {', '.join(f'`{name}`' for name in sorted(IGNORED))} |"]
    lines += ["", "| field | neutral values, besides null | instead of others |", "|---|---|---|"]
    for name, neutral in sorted(NEUTRAL.items()):
        values = ", ".join(f"`{json.dumps(value)}`" for value in neutral.values)
        lines.append(f"| `{name}` | {values} | {neutral.advice} |")
    return [*lines, ""]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page has other tables")
    if not parser.parse_args(argv).check:
        write_table(PAGE, SCRIPT, table())
    elif table_of(PAGE, SCRIPT) != table():
        print(f"{PAGE}: its tables are not those of the code; run PYTHONPATH=. python {SCRIPT}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
