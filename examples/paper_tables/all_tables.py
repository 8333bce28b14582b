"""Writes every table of every paper into paper_tables_out/, docs/reproduction.md and docs/five_papers.md."""

import argparse
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

from megatron.context_parallel.cli.run_main import announce, run_main
from megatron.context_parallel.progress import Progress

from . import one_cluster
from .beyond import beyond
from .cells import PAPERS, ROOT, read_results, results_file, tables_of
from .predictions import predicted, written
from .reproduction import write_page
from .simulate import publish

OUTPUT = ROOT / "paper_tables_out"
PROCESSES = 2


def write_paper(paper: str) -> float:
    """All tables of a paper; returns the seconds that they took."""
    start = time.perf_counter()
    for table in tables_of(paper):
        publish(predicted(paper, table, OUTPUT), paper, table, OUTPUT)
    return time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", choices=("tables", "five_papers"), help="default: everything")
    args = parser.parse_args(argv)
    with ProcessPoolExecutor(PROCESSES) as pool:
        if args.only != "five_papers":
            _write_tables(pool)
        if args.only != "tables":
            one_cluster.write_page(pool)
            print("wrote docs/five_papers.md")
    return 0


def _write_tables(pool: ProcessPoolExecutor) -> None:
    papers = written()
    times = {paper: pool.submit(write_paper, paper) for paper in reversed(papers)}  # the longest first
    more = {paper: pool.submit(beyond, paper) for paper in papers}
    announce(f"predicting the tables of {len(papers)} papers in {PROCESSES} processes")
    progress = Progress("predicting papers, and what this project would choose", len(times) + len(more))
    for _ in as_completed([*times.values(), *more.values()]):
        progress.advance()
    for paper, seconds in times.items():
        print(f"{PAPERS[paper]}: {seconds.result():.0f} s", flush=True)
    keys = [(paper, table) for paper in papers for table in tables_of(paper)]
    results = {key: read_results(results_file(*key, OUTPUT)) for key in keys}
    write_page(results, {paper: table.result() for paper, table in more.items()})
    print(f"wrote {OUTPUT.relative_to(ROOT)}/ and docs/reproduction.md", flush=True)


if __name__ == "__main__":
    run_main(main, "paper_tables")
