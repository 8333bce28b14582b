"""A small described cluster."""

from megatron.context_parallel.cluster.description import (
    AttentionRate,
    Cluster,
    Device,
    IntraNode,
    Nics,
)

DEVICE = Device(
    name="test",
    peak_TFLOP_s=1,
    memory_GiB=1,
    memory_GB_s=1e9,
    block_us=0,
    attention=(AttentionRate(rows=1, forward_TFLOP_s=1, backward_TFLOP_s=1),),
)

BOX = Cluster(
    name="box",
    source="made up",
    nodes=2,
    devices_per_node=4,
    device=DEVICE,
    inside=IntraNode(GB_s=100, latency_us=0),
    nics=Nics(per_node=4, GB_s=10, latency_us=0),
)

BOX_TEXT = """
name: box
source: made up
nodes: 2
devices_per_node: 4
device:
  {name: test, peak_TFLOP_s: 1, memory_GiB: 1, memory_GB_s: 1.0e+9, block_us: 0,
   attention: [{rows: 1, forward_TFLOP_s: 1, backward_TFLOP_s: 1}]}
inside: {GB_s: 100, latency_us: 0}
nics: {GB_s: 10, per_node: 4, latency_us: 0}
"""
