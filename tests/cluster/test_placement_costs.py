"""Seconds of a pair and of a row of keys on a cluster."""

from dataclasses import replace

import pytest

from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.step.placement_costs import placement_costs
from megatron.context_parallel.plan.volume import Shape

SHAPE = Shape(rows=16384, heads=32, kv_heads=8, head_dim=128, itemsize=2)
ROW = 2 * 2 * 8 * 128 * 2  # bytes of keys and values of a row, in both passes


def test_costs_are_those_of_the_description():
    costs = placement_costs(SHAPE, load_cluster("dgx-h100"))
    assert costs.pair == pytest.approx(4 * 32 * 128 * (1 / 648e12 + 2.5 / 561e12))
    assert (costs.row_inside, costs.row_between) == pytest.approx((ROW / 450e9, ROW / 50e9))
    assert costs.ranks_per_node == 8
    assert placement_costs(SHAPE, load_cluster("dgx-h100"), ranks_per_node=2).ranks_per_node == 2


def test_devices_share_links():
    cluster = load_cluster("dgx-h100")
    nics = replace(cluster.nics, per_node=2)
    shared = replace(cluster, inside=replace(cluster.inside, shared=True), nics=nics)
    costs = placement_costs(SHAPE, shared)
    assert (costs.row_inside, costs.row_between) == pytest.approx((8 * ROW / 450e9, 4 * ROW / 50e9))
    one_node = placement_costs(SHAPE, cluster.part(4))
    assert (one_node.row_between, one_node.ranks_per_node) == (0, 4)
