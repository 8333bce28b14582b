"""The time to the first token on emulated hosts: what a device sleeps for, and how its times become seconds of GPUs."""

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import mappings

from benchmarks.device import EmulatedDevice
from benchmarks.first_token import (
    AUTO,
    FULL,
    TENSOR,
    Case,
    cases_of,
    emulated,
    forecast,
    lines,
    measured,
    paper_seconds,
)
from benchmarks.first_token_rank import Layers
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.inference.choose import PASS_KV, PASS_Q

LAYERS = 126  # of Llama 3 405B


def test_a_case_sleeps_for_what_is_predicted_and_sends_the_rest():
    case = Case(2, PASS_KV, FULL, 0.05)
    given, parts = emulated(case, 4096, 80), forecast(case, PASS_KV)
    assert (given["new"], given["cached"], given["parallel"]) == (205, 3891, "context")
    slept = given["rest"] * LAYERS / 80
    assert slept + parts.attention == pytest.approx(parts.seconds) and given["sums"] == 0
    full = Case(2, TENSOR, FULL, 1.0)
    given, parts = emulated(full, 1024, 40), forecast(full, PASS_KV)
    assert given["rest"] * LAYERS / 40 == pytest.approx(parts.seconds - parts.attention - parts.tensor)
    assert 2 * given["sums"] * LAYERS / 40 == pytest.approx(forecast(full._replace(hosts=1), PASS_KV).tensor)


def test_measured_times_are_those_of_all_layers_on_the_gpus():
    case = Case(2, AUTO, FULL, 1.0)
    rounds = [[{"seconds": 1.0}, {"seconds": 3.0}], [{"seconds": 2.0}, {"seconds": 2.5}], [{"seconds": 9.0}] * 2]
    entry = {"case": [*case], "variant": PASS_KV, "python": 0.03, "rounds": rounds}
    found = measured([{"slower": 40, "entries": [entry]}], layers=2)
    assert found[case]["seconds"] == pytest.approx(3.0 / 40 * LAYERS / 2) and found[case]["python"] == 0.01
    assert lines(found)[-1].startswith("| 2 | auto: pass-kv | 128K | 100.0% |  | 20.")
    groups = cases_of([1, 2, 8])
    assert [len(group) for group in groups] == [1, 4, 8]


def test_numbers_of_the_paper_have_their_cases():
    assert paper_seconds(Case(4, PASS_Q, FULL, 0.01)) == pytest.approx(0.89871)
    assert paper_seconds(Case(4, PASS_KV, FULL, 1.0)) == pytest.approx(11.462)
    for case in (Case(4, AUTO, FULL, 0.01), Case(2, PASS_Q, FULL, 1.0), Case(8, PASS_KV, 32_000, 1.0)):
        assert paper_seconds(case) is None


def test_sums_between_hosts_and_inside_a_host_take_the_longer_of_both(monkeypatch):
    monkeypatch.setattr(mappings, "_reduce", lambda x, group: x + group.size())
    device = EmulatedDevice(load_cluster("gtt").device, "bf16", 128, lambda seconds: nullcontext())
    layers, x = Layers(device), torch.zeros(2)

    four = mock.Mock(**{"size.return_value": 4})
    layers.watch_sums()
    assert mappings._reduce(x, four)[0] == 4  # while it computes
    device.computes = False
    with layers.of({"rest": 2.0, "sums": 3.0}):
        assert mappings._reduce(x, four) is x and device.seconds == 0  # of the embedding
        layers.begin()
        assert mappings._reduce(x, four)[0] == 4 and device.seconds == 5
