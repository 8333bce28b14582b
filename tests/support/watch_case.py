"""Kills a rank of one job, stops a rank of another, and prints what happened as JSON: `watch_case.py DIR`."""

import io
import json
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron.context_parallel.commands import stuck
from tests.campaigns.faults import actions
from tests.campaigns.faults.bench import Bench
from tests.campaigns.faults.job import Outcome, warm
from tests.campaigns.faults.moments import Fault, Moment

SECONDS_STOPPED = 8


def told(outcome: Outcome, save: Path) -> dict:
    logs = {path.name: path.read_text() for path in save.glob("crash/*")}
    lines = [line.text for line in outcome.after]
    return {"lines": lines, "statuses": outcome.statuses, "left": outcome.left, "logs": logs, "text": outcome.text}


def main(directory: Path) -> None:
    bench, cases = Bench(directory), {}

    save = bench.fresh("killed")
    fault = Fault(Moment("forward", 2, 1), 1, actions.kill)
    cases["killed"] = told(bench.run("cp2", save, fault=fault, agent_store=False), save)

    def look() -> None:
        time.sleep(1)  # until rank 1 waits
        with redirect_stdout(io.StringIO()) as table:
            stuck.main([])
        tables.append(table.getvalue())

    tables: list[str] = []
    save = bench.fresh("stopped")
    fault = Fault(Moment("backward", 3, 1), 0, actions.stop)
    more = f"--distributed-timeout-seconds-after-init {SECONDS_STOPPED}"
    outcome = bench.run("cp2", save, fault=fault, agent_store=False, meanwhile=look, more=more, limit=120)
    cases["stopped"] = told(outcome, save) | {"table": tables[0]}
    print(json.dumps(cases))


if __name__ == "__main__":
    warm()
    main(Path(sys.argv[1]))
