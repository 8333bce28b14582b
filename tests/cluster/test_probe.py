"""Measuring a cluster: the ranks of this machine write a description, and predictions with it work."""

import inspect
import os
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import ScalingType, scaled_mm

from megatron.context_parallel import UsageError
from megatron.context_parallel.cluster.description import load_cluster, save_cluster
from megatron.context_parallel.cluster.measure import meter, probe, probe_device
from megatron.context_parallel.cluster.measure.probe_links import LinkProbe
from megatron.context_parallel.cluster.simulate.one_pass import simulate
from megatron.context_parallel.commands.cluster_probe import read_flags
from megatron.context_parallel.plan.volume import Shape
from megatron.context_parallel.strategies import parse_spec
from tests.support.pretended_gpu import GPU, pretended_gpu


class BriefMeter(meter.Meter):
    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.target = 0.002


def measured(each: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(each))
        patch.setattr(probe, "Meter", BriefMeter)
        patch.setattr(meter, "LARGEST", {"cpu": 2**20})
        patch.setattr(probe_device, "LEAST", 0.002)
        patch.setattr(probe_device, "COLD", 2**22)
        how = {"dtype": torch.bfloat16, "heads": 2, "kv_heads": 1, "head_dim": 32}
        return probe.probe(device=torch.device("cpu"), quick=True, **how)


def test_what_is_measured_is_the_same_on_all_ranks_and_predicts(ranks, tmp_path):
    clusters = ranks(4, measured, 2)
    first = clusters[0]
    assert clusters == [first] * 4
    assert (first.nodes, first.devices_per_node, first.nics.per_node in (1, 2)) == (2, 2, True)
    assert first.inside.GB_s > 0 and first.device.memory_GB_s > 0 and first.device.pass_us > 0
    assert first.buffered_sends and (first.shared_cores is None) == (len(os.sched_getaffinity(0)) >= 4)
    assert 0 < (first.shared_cores or 1) <= len(os.sched_getaffinity(0))
    kinds = {(rate.mask, rate.keys and rate.keys // rate.rows) for rate in first.device.attention}
    assert kinds == {("full", None), ("full", 4), ("causal", None)}
    save_cluster(first, tmp_path / "here.yaml")
    assert load_cluster(str(tmp_path / "here.yaml")) == first
    plan = parse_spec("ring").plan(4, heads=2, kv_heads=1)
    assert 0 < simulate(plan, first, Shape(256, 2, 1, 32, 2)).seconds < 10


class AloneMeter(meter.Meter):
    """Of one rank with a pretended GPU."""

    def __init__(self) -> None:
        self.device, self.quick, self.target = GPU, True, 1e9

    def everyone(self, value: object) -> list:
        return [value]

    def start_together(self) -> None:
        pass


def scaled_mm_by_definition(*args: object, **how: object) -> torch.Tensor:
    """As PyTorch's, for which torch 2.11 has no kernel on CPUs."""
    given = inspect.signature(scaled_mm).bind(*args, **how).arguments
    assert given["scale_recipe_a"] == given["scale_recipe_b"] == ScalingType.TensorWise
    product = (given["mat_a"].float() * given["scale_a"]) @ (given["mat_b"].float() * given["scale_b"])
    return product.to(given["output_dtype"])


@pytest.mark.parametrize("nodes", ["abab", "aab", "abba"])
def test_nodes_have_as_many_ranks_each_one_after_the_other(nodes):
    def on(nodes: str) -> LinkProbe:
        ranks = SimpleNamespace(rank=len(nodes) - 1, n=len(nodes), everyone=lambda mine: list(nodes))
        return LinkProbe(ranks, lambda: None)

    found = on("aabb")
    assert (found.nodes, found.each, found.node, found.rank_in_node) == (2, 2, 1, 1)
    with pytest.raises(UsageError, match=f"^{len(nodes)} ranks on 2 nodes: need as many on each"):
        on(nodes)


def test_a_gpu_has_rates_of_16_and_of_8_bit_products(monkeypatch):
    monkeypatch.setattr(probe_device, "scaled_mm", scaled_mm_by_definition)
    monkeypatch.setitem(probe_device.SIZES, "cuda", (32, 64))
    monkeypatch.setattr(probe_device, "COLD_ON_GPU", 2**12)
    with pretended_gpu((8, 9)):
        assert probe_device._has_fp8(GPU)
        for dtype, name in ((torch.bfloat16, "bf16"), (torch.float8_e4m3fn, "fp8")):
            rates = probe_device._gemms(AloneMeter(), dtype)
            assert [(rate.size, rate.dtype) for rate in rates] == [(32, name), (64, name)]
            assert all(rate.TFLOP_s > 0 for rate in rates)
        product = probe_device._product(GPU, torch.float8_e4m3fn, 32)
        torch.manual_seed(0)
        first, second = (product().to("cpu") for _ in range(2))
    assert first.dtype == torch.bfloat16 and not torch.equal(first, second)  # other matrices each time
    assert 3 < first.float().std() < 9  # sums of 32 products of standard normal numbers
    with pretended_gpu((8, 0)):
        assert not probe_device._has_fp8(GPU)


@pytest.mark.parametrize(
    "flags,message",
    [
        (
            "--num-attention-heads 6 --num-query-groups 4",
            "--num-query-groups 4: does not divide --num-attention-heads 6; ",
        ),
        ("--kv-channels 0", "--kv-channels 0: need a whole number, 1 or more"),
        ("--output c.json", "--output c.json: must end in .yaml"),
        ("--output nowhere/c.yaml", "--output nowhere/c.yaml: the folder nowhere does not exist"),
        ("", "no ranks: start it with torchrun --nproc-per-node 2"),
    ],
)
def test_a_mistake_is_one_line(flags, message, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError) as error:
        read_flags(["--output", "c.yaml", *flags.split()])
    assert str(error.value).startswith(message)
