"""Show the position of each rank of the jobs on this host, what it waits for, and which rank the others wait for.

It reads a small file of each rank, so it also shows stopped ranks. With py-spy installed, it shows the current line of
code of a stopped rank.
"""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.stuck()

import json
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.table import Table

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.runtime.comm.flight_recorder import Position, named
from megatron.context_parallel.trainer.faults.rank_file import RankProcess, rank_files, read_rank_file
from megatron.context_parallel.trainer.faults.wait_graph import chains, culprits, wait_graph

_WIDTH = 80
_LOOK = 1.0  # seconds between two looks
_NO_ANSWER = 10  # seconds for py-spy


class StuckFlags(FlagSection):
    image: Path | None = flag("also draw which rank waits for which, as a picture", example="waits.png")


PARSER = FlagParser(StuckFlags, __doc__, "[flags]", ["", "--image waits.png"])


@dataclass(frozen=True)
class RunningRank:
    """A rank of a job on this host."""

    process: RankProcess
    position: Position
    state: str  # "moves", "waits", "still" (does not move, waits for no rank) or "stopped" (by a signal)


def look() -> dict[str, dict[int, RunningRank]]:
    """The ranks on this host by job, sampled twice."""
    before = _read()
    time.sleep(_LOOK)
    jobs: dict[str, dict[int, RunningRank]] = defaultdict(dict)
    for process, (position, status) in _read().items():
        still = process in before and before[process][0].notes == position.notes
        state = "waits" if position.waits else "still"
        if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            state = "stopped"
        jobs[process.job][process.rank] = RunningRank(
            process, position, state if still or state == "stopped" else "moves"
        )
    return {job: dict(sorted(ranks.items())) for job, ranks in jobs.items()}


def _read() -> dict[RankProcess, tuple[Position, str]]:
    found = {}
    for path in rank_files():
        with suppress(OSError, ValueError, psutil.NoSuchProcess):  # the rank ends just now
            process, position = read_rank_file(path)
            found[process] = position, psutil.Process(process.pid).status()
    return found


def culprits_of(ranks: dict[int, RunningRank]) -> list[int]:
    """The ranks that the others wait for; none if the job makes progress."""
    stopped = [rank for rank, seen in ranks.items() if seen.state == "stopped"]
    if not stopped and any(seen.state == "moves" for seen in ranks.values()):
        return []
    return culprits({rank: seen.position for rank, seen in ranks.items()}, stopped)


def describe(ranks: dict[int, RunningRank], blamed: list[int]) -> None:
    """Print the table of a job, its culprits, and the chains of waiting ranks."""
    title = f"{len(ranks)} of {next(iter(ranks.values())).process.world} ranks are on this host"
    table = Table("rank", "state", "iteration", "where", "waits", title=title)
    for rank, seen in ranks.items():
        at = seen.position
        where = str(at._replace(iteration=0, waits=None, code="")) or "start-up"
        table.add_row(str(rank), seen.state, str(at.iteration), where, at.awaited)
    show(table, width=_WIDTH)
    if not blamed:
        print("the job makes progress")
        return
    if len(blamed) > 1 and all(rank in ranks and ranks[rank].state == "waits" for rank in blamed):
        print(f"{named(blamed)} wait for each other")
    else:
        print(f"culprit: {named(blamed)}")
    for rank in blamed:
        print(f"  {_told(rank, ranks)}")
    stopped = [rank for rank, seen in ranks.items() if seen.state == "stopped"]
    for chain in chains({rank: seen.position for rank, seen in ranks.items()}, stopped):
        last = f" ({ranks[chain[-1]].state})" if chain[-1] in ranks and chain[-1] not in chain[:-1] else ""
        print(" -> ".join(map(str, chain)) + last)


def _told(rank: int, ranks: dict[int, RunningRank]) -> str:
    if rank not in ranks:
        return f"rank {rank} is on another host; run cp-stuck there"
    process = ranks[rank].process
    code = ranks[rank].position.code if ranks[rank].state != "stopped" else ""
    return f"rank {rank} (process {process.pid}, {ranks[rank].state}) in {code or code_of(process.pid)}"


def code_of(pid: int) -> str:
    """The current line of code of another process's main thread, from py-spy."""
    program = shutil.which("py-spy", path=Path(sys.executable).parent) or shutil.which("py-spy")
    if not program:
        return "unknown code (pip install 'megatron-context-parallel[debug]' to show it with py-spy)"
    command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NO_ANSWER, check=True)
    except subprocess.CalledProcessError as error:
        return f"unknown code (py-spy: {(error.stderr.strip() or 'failed').splitlines()[-1]})"
    except subprocess.TimeoutExpired:
        return "unknown code (py-spy did not answer)"
    frames = next(thread["frames"] for thread in json.loads(done.stdout) if thread["thread_name"] == "MainThread")
    frame = next((frame for frame in frames if "megatron" in frame["filename"]), frames[0])
    return f"{frame['name']} ({Path(frame['filename']).name}:{frame['line']})"


def draw_wait_graph(ranks: dict[int, RunningRank], blamed: list[int], path: str) -> None:
    """Draw which rank waits for which, with the culprits in red, to an image file."""
    import matplotlib

    matplotlib.use("Agg")
    import networkx
    from matplotlib import pyplot

    still = {rank: Position() if seen.state == "stopped" else seen.position for rank, seen in ranks.items()}
    graph = wait_graph(still)
    figure, axes = pyplot.subplots(figsize=(6, 6), layout="constrained")
    colors = ["tab:red" if rank in blamed else "lightgray" for rank in graph]
    networkx.draw_networkx(graph, networkx.circular_layout(graph), ax=axes, node_color=colors, node_size=900)
    axes.set_axis_off()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    image = PARSER.parse(argv).image
    jobs = look()
    if not jobs:
        raise UsageError("no job is running; run this as the job's user, on its host and in its container")
    for number, ranks in enumerate(jobs.values()):
        if number:
            print()
        blamed = culprits_of(ranks)
        describe(ranks, blamed)
        if image:
            path = image if len(jobs) == 1 else image.with_stem(f"{image.stem}-{number}")
            draw_wait_graph(ranks, blamed, str(path))
            print(f"wrote {path}")
