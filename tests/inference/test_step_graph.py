"""CUDA graphs of decode steps, pretended: a replay gives what the step gives, also after changes."""

import logging
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.context_parallel.inference.decode_attention import DecodeAttention
from megatron.context_parallel.inference.decode_layer import DecodeLayer
from megatron.context_parallel.inference.decode_pages import DecodePages
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.inference.step_graph import GraphPool, StepGraph
from tests.support.recorded_graph import RecordedGraph, recorded_graphs
from tests.support.session_case import VOCABULARY, session, start


def _sessions(positions: str = "rope", changes: dict | None = None, **options) -> list[Session]:
    """One without graphs and one with them."""
    pair = [session(positions, changes=changes, **options) for _ in range(2)]
    pair[1].graphs = GraphPool(pair[1].device)
    return pair


def _graphs(of: Session) -> list[StepGraph]:
    return [step._graph for step in of._steps.values()]


def _logits(of: Session) -> Tensor:
    """The logits of rows that begin and end; their pages have four rows."""
    lengths = {of.open(): length for length in (9, 1, 30, 4)}
    of.forward({s: [s] * length for s, length in lengths.items()})
    found = []
    for step in range(14):
        if step == 5:
            of.free(1)  # the next one takes its pages
            lengths.pop(1)
            lengths[new := of.fork(3, 20)] = 20
            found += of.forward({new: [1, 2, 3]}).values()
        if step == 9:
            of.free(2)
            lengths.pop(2)
        logits = of.forward({s: [(s + 5 * step) % VOCABULARY] for s in lengths})
        found += [logits[s].clone() for s in lengths]
    return torch.stack(found)


CASES = [
    {},
    {"changes": {"window_size": (6, 0), "softmax_type": "learnable", "qk_layernorm": True}},
    {"positions": "learned_absolute", "changes": {"normalization": "LayerNorm"}, "kv_cache_dtype": "int8"},
]


def _cases() -> list:
    start()
    found = []
    with recorded_graphs():
        for case in CASES:
            eager, graph = _sessions(**case)
            expected = _logits(eager)
            with mock.patch.object(DecodeLayer, "finish", autospec=True, side_effect=DecodeLayer.finish) as finish:
                equal = torch.equal(_logits(graph), expected)
            replays = [of.graph.replays for of in _graphs(graph)]
            found.append((equal, bool(expected.isfinite().all()), replays, finish.call_count))
            assert _graphs(eager) == [None] * 2
    return found


def test_a_replay_gives_what_the_step_gives(ranks):
    (found,) = ranks(1, _cases)
    # Of the 14 steps, nine have four rows and five have three. The first of each runs twice, in two layers, and is
    # replayed too, to compare.
    assert found == [(True, True, [9, 5], 2 * 2 * 2)] * len(CASES)


def _replaced() -> tuple[bool, list[float], int]:
    start()
    with recorded_graphs(), torch.no_grad():
        found, graphs = [], []
        for of in _sessions():
            captured = mock.patch.object(StepGraph, "_run_and_capture", autospec=True, side_effect=_run_and_capture)
            with captured as captures:
                found.append(_logits_of_changes(of))
            graphs.append(captures.call_count)
    moves = (found[0][1:] - found[0][:-1]).abs().amax(-1)
    return torch.equal(*found), moves.tolist(), graphs


_run_and_capture = StepGraph._run_and_capture


def _logits_of_changes(of: Session) -> Tensor:
    """The logits of one token at one position, with other weights each time."""
    fc2, norm = of.model.decoder.layers[1].mlp.linear_fc2, of.model.decoder.final_layernorm
    sequence, found = of.open(), []
    of.forward({sequence: [1, 2, 3]})

    def step() -> None:
        again = of.fork(sequence, 3)
        found.append(of.forward({again: [4]})[again].clone())
        of.free(again)

    step()
    fc2.weight.mul_(1.5)
    step()
    fc2.weight.data = fc2.weight * 1.5
    step()
    norm.weight = torch.nn.Parameter(norm.weight * 2)
    step()
    return torch.stack(found)


def test_weights_may_change_and_be_replaced(ranks):
    ((equal, moves, captures),) = ranks(1, _replaced)
    assert equal and min(moves) > 0.01
    assert captures == [0, 3]  # at first, and for each replaced tensor


def _warnings() -> list[str]:
    """Gets the warnings that follow."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("megatron.context_parallel.inference.step_graph").addHandler(handler)
    return lines


def _no_graph() -> tuple[bool, list[str], int]:
    start()
    lines = _warnings()
    finish = DecodeLayer.finish

    def reads(self, of):
        finish(self, of)
        of.x.sum().item()

    with recorded_graphs(), mock.patch.object(DecodeLayer, "finish", reads):
        eager, graph = _sessions()
        equal = torch.equal(_logits(graph), _logits(eager))
    return equal, lines, sum(of.graph is None for of in _graphs(graph))


def test_a_step_that_cannot_be_captured_runs_with_a_warning(ranks):
    ((equal, lines, without),) = ranks(1, _no_graph)
    assert equal and without == 2  # the steps of three and of four rows
    # No other capture is tried.
    assert lines == ["decode steps run without a CUDA graph: operation not permitted when stream is capturing"]


def _replays_nothing() -> tuple[bool, list[str]]:
    start()
    lines = _warnings()
    with recorded_graphs(), mock.patch.object(RecordedGraph, "replay", lambda self: None):
        eager, graph = _sessions()
        equal = torch.equal(_logits(graph), _logits(eager))
    return equal, lines


def test_a_graph_with_other_logits_than_the_step_is_not_used(ranks):
    ((equal, lines),) = ranks(1, _replays_nothing)
    assert equal
    assert lines == ["decode steps run without a CUDA graph: it has other logits than the step"] * 2


@pytest.mark.parametrize(
    ("ranks_of_group", "pages", "captured"), [(1, True, True), (2, True, False), (1, False, False)]
)
def test_messages_and_runs_of_keys_are_not_captured(ranks_of_group, pages, captured):
    attention = object.__new__(DecodeAttention)
    attention.group = SimpleNamespace(n=ranks_of_group)
    attention.keys = object.__new__(DecodePages) if pages else object()
    assert attention.can_be_captured is captured
