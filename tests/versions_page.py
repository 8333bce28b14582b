"""Writes the results of tests/versions.sh into the table of docs/versions.md.

    python tests/versions_page.py RESULTS PAGE

RESULTS has for each row PYTHON-TORCH-MEGATRON.xml, pytest's JUnit file, and .jsonl, the quickstart's metrics. Rows of
the table without a result there stay as they are.
"""

import json
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

PINNED = "3.11-2.13.0-0.16.1"  # requirements.txt
HEAD = [
    "| Python | torch | megatron-core | date | passed | skipped | failed | quickstart |",
    "|---|---|---|---|---|---|---|---|",
]


def main(results: Path, page: Path) -> int:
    """0 if no test of the results failed, otherwise 1."""
    lines = page.read_text().splitlines()
    start = lines.index(HEAD[0])
    end = lines.index("", start)
    rows = {releases_of(line): line for line in lines[start + len(HEAD) : end]}
    for result in results.glob("*.xml"):
        rows[tuple(result.stem.split("-"))] = row_of(result)
    newest_first = sorted(rows, key=as_numbers, reverse=True)
    lines[start:end] = [*HEAD, *(rows[releases] for releases in newest_first)]
    page.write_text("\n".join(lines) + "\n")
    return int(any(failed_in(result) for result in results.glob("*.xml")))


def releases_of(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.split("|")[1:4])


def as_numbers(releases: tuple[str, ...]) -> list[list[int]]:
    """Releases as numbers, by which 2.9 is older than 2.11: torch first."""
    python, torch, megatron = ([int(part) for part in release.split(".")] for release in releases)
    return [torch, megatron, python]


def row_of(result: Path) -> str:
    date = time.strftime("%Y-%m-%d", time.gmtime(result.stat().st_mtime))
    skipped, failed = count(result, "skipped"), failed_in(result)
    passed = count(result, "tests") - skipped - failed
    cells = [*result.stem.split("-"), date, passed, skipped, failed, difference(result.with_suffix(".jsonl"))]
    return "| " + " | ".join(map(str, cells)) + " |"


def failed_in(result: Path) -> int:
    return count(result, "failures") + count(result, "errors")


def count(result: Path, outcome: str) -> int:
    suite = ElementTree.parse(result).getroot()[0]
    return int(suite.get(outcome, "0"))


def difference(metrics: Path) -> str:
    """The largest difference of a loss of the quickstart from those of the pinned releases."""
    pinned = metrics.with_name(f"{PINNED}.jsonl")
    if not (pinned.exists() and metrics.exists()):
        return "not compared"
    losses, expected = losses_of(metrics), losses_of(pinned)
    assert losses.keys() == expected.keys()
    return f"{max(abs(losses[iteration] - expected[iteration]) for iteration in expected):.1g}"


def losses_of(metrics: Path) -> dict[int, float]:
    """The loss of each iteration."""
    entries = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {entry["iteration"]: entry["lm_loss"] for entry in entries if "lm_loss" in entry}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
