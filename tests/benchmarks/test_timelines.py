"""Predicted and measured timelines, one above the other."""

import json

import pytest

from benchmarks.timelines import Span, draw, measured, predicted
from megatron.context_parallel import UsageError

BLOCK, SEND, ANOTHER = "queries 0 x keys 0", "KV 0 to 1", "queries 0 x keys 1"


def simulated(path):
    passes = [("forward", "blocks", BLOCK, 0, 2), ("forward", "ring", SEND, 0, 3), ("backward", "blocks", BLOCK, 4, 6)]
    events = [
        {"ph": "X", "name": name, "pid": 0, "tid": lane, "args": {"pass": which}, "ts": 1e3 * a, "dur": 1e3 * (b - a)}
        for which, lane, name, a, b in passes
    ]
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "pid": 0}, *events]}))
    return path


def profiled(path, block=BLOCK):
    """Two passes of a rank whose clock starts at 5 ms; the later ones come first in the file."""
    events = [{"cat": "user_annotation", "name": block, "ts": ts, "dur": 1500.0} for ts in (9000.0, 1000.0)]
    events += [{"cat": "plan", "tid": "ring", "name": SEND, "ts": ts, "dur": 500.0} for ts in (9000.0, 2000.0)]
    events.append({"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 1.0})
    path.write_text(json.dumps({"traceEvents": events, "baseTimeNanoseconds": 5_000_000}))
    return path


def test_the_first_pass_is_drawn_below_the_predicted_one(tmp_path):
    above = predicted(simulated(tmp_path / "predicted.json"))
    assert above == {(0, "blocks"): [Span(BLOCK, 0, 2)], (0, "ring"): [Span(SEND, 0, 3)]}
    below = measured([profiled(tmp_path / "rank0.pt.trace.json")], above)
    assert below == {(0, "blocks"): [Span(BLOCK, 0, 1.5)], (0, "ring"): [Span(SEND, 1, 1.5)]}
    draw({"predicted": above, "measured": below}, tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 1000


def test_traces_of_another_strategy_are_refused(tmp_path):
    above = predicted(simulated(tmp_path / "predicted.json"))
    with pytest.raises(UsageError, match="rank 0, blocks: other blocks or messages than predicted"):
        measured([profiled(tmp_path / "rank0.pt.trace.json", ANOTHER)], above)
