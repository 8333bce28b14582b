"""Writes docs/reproduction.md: the text is a template, and the numbers come from the output files."""

import csv
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence

from . import mlperf_table, nemo_table
from .cells import HERE, PAPERS, ROOT, Result, words
from .constants import by_hand, fitted
from .contradictions import consistent, contradiction_table, contradictions
from .drawing import draw, draw_all
from .judged import BARS, CHOICES, MEMORY_BAR, MISSED, ONE_BAR, Errors, as_printed, percent, regret
from .predictions import predictor
from .simulate import table_name
from .volumes import volume_table

PAGE = ROOT / "docs" / "reproduction.md"
PICTURES = ROOT / "docs" / "reproduction"
SUMMARY = "<!-- the tables -->\n"
VOLUMES = (
    "The table has the data that the busiest rank receives in one attention, forward plus backward, with a causal\n"
    "mask. The unit is N d, one tensor of all tokens. As in the papers, the dtype of partial results is ignored."
)
EACH = "<!-- the papers -->\n"
OPENING = "<!-- the opening -->\n"
BY_HAND, FITTED, OTHERS = "<!-- set by hand -->\n", "<!-- fitted -->\n", "<!-- other numbers -->\n"
ALL = "Every cell of the five papers that is known: predicted against printed, in the unit of its table"
ONE_TARGET = "<!-- one target -->\n"
LEFT_OUT, CONTRADICTIONS = "<!-- left out -->\n", "<!-- contradictions -->\n"
NEAR = 0.1  # an error that the opening counts as small


def write_page(results: dict[tuple[str, str], Sequence[Result]], beyond: dict[str, str]) -> None:
    """Fills the template with a summary of all tables and a section for each paper.

    Args:
        results: of each paper's tables.
        beyond: for each paper the rows of what this project would choose, as a Markdown table.
    """
    page = words(HERE / "page.md")
    summary = [
        "| table | testbed | cells | fitted | errors of cells not fitted | of all | leave-one-column-out | target |",
        "|---|---|---|---|---|---|---|---|",
        *(_line(paper, table, of) for (paper, table), of in results.items()),
    ]
    sections = []
    for paper in PAPERS:
        own = {table: of for (name, table), of in results.items() if name == paper}
        sections.append(_section(paper, own, beyond))
    every = [result for of in results.values() for result in of]
    draw_all(every, ALL, PICTURES / "all.png")
    page = page.replace(OPENING, f"{opening([*consistent(results)])}\n\n![{ALL}](reproduction/all.png)\n")
    page = page.replace(BY_HAND, by_hand() + "\n").replace(FITTED, fitted() + "\n")
    page = page.replace(OTHERS, f"{nemo_table.section()}\n### GPT-3 of MLPerf\n\n{mlperf_table.section()}")
    page = page.replace(ONE_TARGET, one_target_table(results) + "\n")
    page = page.replace(LEFT_OUT, left_out_table() + "\n")
    page = page.replace(CONTRADICTIONS, contradiction_table(results) + "\n")
    page = page.replace(SUMMARY, "\n".join(summary) + "\n").replace(EACH, "\n".join(filter(None, sections)))
    PAGE.write_text(re.sub(r"\n{3,}", "\n\n", page).rstrip() + "\n")


def opening(results: Sequence[Result]) -> str:
    """How far predictions are from the papers, over the cells that judge them."""
    errors = [abs(r.error) for r in results if not r.fitted and r.error is not None]
    near = sum(error <= NEAR for error in errors) / len(errors)
    withheld = sum(not r.paper for r in results)
    return (
        f"**The median error is {percent(100 * statistics.median(errors))} % over {len(errors)} cells\n"
        "that no parameter was fitted to and that do not contradict their paper.\n"
        f"{100 * near:.0f} % of these cells are predicted within {100 * NEAR:.0f} %.** Another {withheld} cells are\n"
        "withheld: their numbers are not known here."
    )


def left_out(paper: str, what: str = "column") -> dict[str, float]:
    """The median errors in percent that the calibration found, by table, where it is known.

    Args:
        paper: its folder.
        what: was left out: one "column" after the other, the "table", or the "testbed".
    """
    path = HERE / paper / "left_out.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        found = {line["table"]: line.get(f"{what}_percent") for line in csv.DictReader(file)}
    return {table: float(number) for table, number in found.items() if number}


def left_out_table() -> str:
    """What predictions owe to a column, to a table, and to the testbed."""
    lines = ["| table | a column left out | the table left out | the testbed left out |", "|---|---|---|---|"]
    for paper, name in PAPERS.items():
        of = {what: left_out(paper, what) for what in ("column", "table", "testbed")}
        for table in of["testbed"]:
            cells = [f"{percent(found[table])} %" for found in of.values()]
            lines.append(f"| {name} {table.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


def one_target_table(results: Mapping[tuple[str, str], Sequence[Result]]) -> str:
    """Whether the median of each table is within one bound, over cells that are visible, not fitted and consistent."""
    lines = ["| table | cells | median error | target | why not |", "|---|---|---|---|---|"]
    for (paper, table), of in results.items():
        wrong = contradictions(paper)
        found = Errors.of(r for r in of if not r.fitted and (r.table, r.row, r.column) not in wrong)
        if not table.startswith("table") or not found:
            continue
        bar = MEMORY_BAR if (paper, table) == ("mesh_attention", "table_5") else ONE_BAR
        reached = round(found.median, 1) <= bar
        why = "" if reached else MISSED[paper, table]
        said = f"{bar:g} %: {'reached' if reached else '**missed**'}"
        lines.append(f"| {_name(paper, table)} | {found.cells} | {percent(found.median)} % | {said} | {why} |")
    return "\n".join(lines)


def _name(paper: str, table: str) -> str:
    return f"{PAPERS[paper] if len(PAPERS[paper]) < 20 else 'Million-Token Inference'} {table.replace('_', ' ')}"


def _line(paper: str, table: str, results: Sequence[Result]) -> str:
    used = sum(r.fitted for r in results)
    out = left_out(paper).get(table)
    parts = [_name(paper, table), f"`{predictor(paper).CLUSTER[table]}`", _cells(results), str(used) if used else ""]
    parts += [
        _errors(r for r in results if not r.fitted),
        _errors(results) if used else "",
        f"{percent(out)} %" if out else "",
    ]
    return f"| {' | '.join([*parts, verdict(paper, table, results)])} |"


def _cells(results: Sequence[Result]) -> str:
    withheld = sum(not r.paper for r in results)
    return f"{len(results)}" + (f", {withheld} withheld" if withheld else "")


def _errors(results: Iterable[Result]) -> str:
    found = Errors.of(results)
    return f"{percent(found.median)} / {percent(found.worst)} %" if found else ""


def verdict(paper: str, table: str, results: Sequence[Result]) -> str:
    """The bar of a table, and whether it is reached. Tables that are withheld as a whole cannot be judged."""
    bar, found = BARS.get((paper, table)), Errors.of(r for r in results if not r.fitted)
    if bar is None:
        return ""
    if found is None:
        return f"{bar:g} %: not judged" if not any(r.paper for r in results) else f"{bar:g} %: no prediction"
    return f"{bar:g} %: {'reached' if round(found.median, 1) <= bar else '**missed**'}"


def _section(paper: str, tables: dict[str, Sequence[Result]], beyond: dict[str, str]) -> str:
    if not tables:
        return ""
    lines = [f"## {PAPERS[paper]}", ""]
    notes = HERE / paper / "notes.md"
    lines += [words(notes)] if notes.exists() else []
    lines += ["Commands, each with `--mode run` or `--mode slurm` to measure:", ""]
    lines += [f"    bash examples/paper_tables/{paper}/{table}.sh" for table in tables]
    lines += ["", *filter(None, (_choosing(paper, table, of) for table, of in tables.items())), ""]
    lines += _picture(paper, tables)
    if paper == "attention2d":
        lines += ["### Table 1 as volumes of the plans", "", VOLUMES, "", volume_table(), ""]
    if paper in beyond:
        lines += ["### Beyond the paper (predictions)", "", beyond[paper], ""]
    return "\n".join(lines) + "\n"


def _choosing(paper: str, table: str, results: Sequence[Result]) -> str:
    if (paper, table) == ("mesh_attention", "table_5"):
        same, all_of = as_printed(r for r in results if r.column.startswith("ring"))
        return f"- Table 5: {same} of {all_of} ring cells are as printed."
    found = regret(results, CHOICES[paper, table]) if (paper, table) in CHOICES else None
    if not found:
        return ""
    return (
        f"- {table.replace('_', ' ').capitalize()}: choosing by prediction is right within 1 % in {found.right} of "
        f"{found.choices} choices; the worst one loses {percent(found.worst)} %."
    )


def _picture(paper: str, tables: dict[str, Sequence[Result]]) -> list[str]:
    """Draws all tables of a paper, and shows it."""
    title = f"{PAPERS[paper]}: predicted against the paper"
    draw(drawn(tables), title, PICTURES / f"{paper}.png")
    return [f"![{title}; a point is a cell, and grey is within 2 % and 10 %](reproduction/{paper}.png)", ""]


def drawn(tables: Mapping[str, Sequence[Result]]) -> dict[str, Sequence[Result]]:
    """The tables in the picture of a paper: those with a cell to compare, by name."""
    some = {table: of for table, of in tables.items() if Errors.of(of)}
    return {table_name(table): of for table, of in some.items()}
