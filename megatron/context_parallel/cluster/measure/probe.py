"""Measures the cluster that the ranks of a group are on, and describes it."""

import time
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.context_parallel.cluster.description import Cluster, IntraNode, Nics

from .meter import Meter
from .probe_device import BlockTimer, measured_device
from .probe_links import LinkProbe

LinkSection = TypeVar("LinkSection", IntraNode, Nics)


def probe(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    quick: bool = False,
) -> Cluster:
    """Measures links, attention blocks, products of matrices and memory. All ranks of the group call it together.

    Args:
        group: ranks node by node; default: the world.
        device: of this rank.
        dtype: of the model.
        heads: query heads of one rank.
        kv_heads: key/value heads of one rank.
        head_dim: size of a head.
        quick: a few seconds instead of one or two minutes: fewer and shorter measurements.

    Returns:
        The cluster, with as many devices as ranks, the same on all ranks.

    Raises:
        UsageError: as `joined`, or nodes that have different numbers of ranks.
    """
    meter = Meter(group, device, quick)
    blocks = BlockTimer(meter, dtype, heads, kv_heads, head_dim)
    links = LinkProbe(meter, blocks.one)
    measured = measured_device(meter, blocks)
    message_us = links.message_us()
    inside, nics = links.inside(message_us), links.nics(message_us)
    cluster = Cluster(
        name=f"{links.nodes} x {links.each} {measured.name}",
        source=f"measured {time.strftime('%Y-%m-%d', time.gmtime())}, torch {torch.__version__}, "
        f"{dist.get_backend(meter.group)}, {heads} heads, {kv_heads} key/value heads",
        nodes=links.nodes,
        devices_per_node=links.each,
        device=measured,
        inside=inside and _rounded(inside),
        nics=nics and _rounded(nics),
        shared_cores=float(f"{meter.processors_together(blocks.one):.3g}") if meter.shared else None,
        busy_latency_us=float(f"{links.busy_latency_us():.4g}"),
        buffered_sends=device.type == "cpu",
        message_us=float(f"{message_us:.4g}"),
    )
    return meter.everyone(cluster)[0]


def _rounded(section: LinkSection) -> LinkSection:
    numbers: dict[str, Any] = {f.name: getattr(section, f.name) for f in fields(section)}
    rounded: dict[str, Any] = {name: float(f"{x:.4g}") for name, x in numbers.items() if isinstance(x, float)}
    return replace(section, **rounded)
