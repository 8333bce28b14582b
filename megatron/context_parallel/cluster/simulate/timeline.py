"""A simulated pass as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing show."""

import json
from pathlib import Path

from megatron.context_parallel.plan.pictures.labels import label
from megatron.context_parallel.plan.pictures.lanes import BLOCKS

from .one_pass import PassForecast


def write_timeline(passes: dict[str, PassForecast], path: Path) -> None:
    """Writes passes, one after the other: a process for each rank, with a thread for blocks and for each channel."""
    events = list[dict]()
    begin = 0.0
    for title, forecast in passes.items():
        for span in forecast.spans:
            lane = span.channel or BLOCKS
            what = label(span.what)
            times = {"ts": (begin + span.start) * 1e6, "dur": (span.end - span.start) * 1e6}
            details = {"pass": title, "step": span.step}
            events.append({"ph": "X", "name": what, "pid": span.rank, "tid": lane, "args": details, **times})
        begin += forecast.seconds
    ranks = sorted({event["pid"] for event in events})
    names = [{"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}} for rank in ranks]
    path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))
