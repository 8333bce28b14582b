"""Devices of an emulated cluster: their description in slow motion, and a sleep that stands for their work."""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from megatron.context_parallel.cluster import description
from megatron.context_parallel.cluster.description import AttentionRate, Device, GemmRate, IntraNode, Nics
from megatron.context_parallel.errors import UsageError

from .flags import Cluster, cluster_of

PAYLOAD = 0.99  # of the bytes of a packet of 9000
COPIES_GB_s = 1.25  # of a rank, while all ranks copy with two processors
INSIDE = IntraNode(GB_s=COPIES_GB_s, latency_us=100.0)  # not shaped
NIC_LATENCY_US = 200.0
OVERHEADS = ("block_us", "kernel_us", "swap_us", "cache_us")


class Busy:
    """Spans of time whose sum is right: `with busy(seconds)` sleeps for what is left of them when its body is done.

    What a span ends late, the next ones are shorter.

    Args:
        clock: the time in seconds.
        pause: sleeps for a number of seconds, or a little longer.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, pause: Callable[[float], object] = time.sleep
    ) -> None:
        self.clock, self.pause = clock, pause
        self.late = 0.0  # seconds by which the last span ended late

    @contextmanager
    def __call__(self, seconds: float) -> Iterator[None]:
        end = self.clock() + seconds - self.late
        yield
        left = end - self.clock()
        if left > 0:
            self.pause(left)
        self.late = self.clock() - end


def slowed(device: Device, scale: float, tokens: float) -> Device:
    """The device in slow motion, for a shorter sequence.

    Its matrix products have `scale` times their rate, and a token stands for `tokens` of a longer sequence. So they
    take 1 / (scale · tokens) times as long as the longer sequence does on the device: a block
    has fewer pairs by the square of `tokens`, a chunk has fewer bytes by `tokens`. The same holds for links of `scale`
    times their rate. Copies and merges are real, so they have the rate of this machine.
    """
    longer = 1 / (scale * tokens)
    return replace(
        device,
        peak_TFLOP_s=device.peak_TFLOP_s * scale,
        memory_GB_s=COPIES_GB_s,
        packing_GB_s=None,
        attention=tuple([_slowed_attention(rate, scale, tokens) for rate in device.attention]),
        gemm=tuple([_slowed_product(rate, scale, tokens) for rate in device.gemm]) if device.gemm else None,
        **{name: getattr(device, name) * longer for name in OVERHEADS},
    )


def _slowed_attention(rate: AttentionRate, scale: float, tokens: float) -> AttentionRate:
    rows = max(1, round(rate.rows / tokens))
    return replace(
        rate,
        rows=rows,
        keys=rate.keys and max(rows + 1, round(rate.keys / tokens)),
        forward_TFLOP_s=rate.forward_TFLOP_s * scale / tokens,
        backward_TFLOP_s=rate.backward_TFLOP_s * scale / tokens,
    )


def _slowed_product(rate: GemmRate, scale: float, tokens: float) -> GemmRate:
    """Only one of the three sizes of a product is a number of tokens."""
    return replace(rate, size=max(1, round(rate.size / tokens ** (1 / 3))), TFLOP_s=rate.TFLOP_s * scale)


def add_device_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group(
        "devices", "attention takes the time of a described device, by sleeping; its results are checked before"
    )
    text = "a preset, such as dgx-h100, or a file as in docs/cluster.md; its NICs replace --node-rate and --nic"
    group.add_argument("--devices", metavar="NAME|FILE", help=text)
    text = "slow motion: all rates are multiplied by this, such as 1e-4; default: 1"
    group.add_argument("--scale", type=float, help=text)
    text = "length of the sequence for which the devices take the time; default: that of the sequence"
    group.add_argument("--stands-for", type=int, metavar="TOKENS", help=text)


def with_devices(args: Namespace, length: int) -> tuple[Cluster, description.Cluster | None]:
    """The cluster of the flags, not yet there, and its description if it has devices.

    The description is that of the emulated cluster: with the slowed devices, the rates of the shaped links, and gloo's
    way of sending.

    Args:
        args: the flags of `add_flags` and `add_device_flags`.
        length: tokens of the sequence.

    Raises:
        UsageError: as `cluster_of`; or flags that need --devices, or cannot be combined with it.
    """
    if args.devices is None:
        for flag in ("scale", "stands_for"):
            if (value := getattr(args, flag)) is not None:
                raise UsageError(f"--{flag.replace('_', '-')} {value}: needs --devices; give a preset or a file")
        return cluster_of(args), None
    scale = 1.0 if args.scale is None else args.scale
    stands_for = length if args.stands_for is None else args.stands_for
    if not 0 < scale <= 1:
        raise UsageError(f"--scale {args.scale}: give a number above 0 and at most 1, such as 1e-4")
    if stands_for < length:
        raise UsageError(f"--stands-for {stands_for}: the sequence has {length} tokens; give as many or more")
    described = description.load_cluster(args.devices, "--devices")
    nics = None
    if args.nodes is not None and args.nodes > 1:
        nics = _shape(args, described, scale)
    place = cluster_of(args, fair=True)
    nodes = 1 if args.nodes is None else args.nodes
    slow = description.Cluster(
        name=f"{nodes} x {place.ranks // nodes} {described.device.name}, emulated",
        source=f"{described.name}, rates times {scale:g}, a token for {stands_for / length:g}; links of tools/netlab",
        nodes=nodes,
        devices_per_node=place.ranks // nodes,
        device=slowed(described.device, scale, stands_for / length),
        inside=INSIDE,
        nics=nics,
        buffered_sends=True,
    )
    return place, slow


def _shape(args: Namespace, described: description.Cluster, scale: float) -> Nics:
    """The NICs of the description, slowed; sets the flags of the lab that has them."""
    for flag in ("node_rate", "nic"):
        if (value := getattr(args, flag)) is not None:
            raise UsageError(f"--{flag.replace('_', '-')} {value}: --devices {args.devices} has it; leave it out")
    if described.nics is None:
        raise UsageError(
            f"--devices {args.devices}: has no nics, but --nodes is {args.nodes}; give a cluster with nics"
        )
    if described.nics.per_node not in (1, described.devices_per_node):
        raise UsageError(
            f"--devices {args.devices}: {described.nics.per_node} nics for {described.devices_per_node} devices; an "
            "emulated node has 1 nic, or as many as devices; give such a file"
        )
    args.nic = "rank" if described.nics.per_node == described.devices_per_node else "node"
    args.node_rate = f"{described.nics.GB_s * scale * 8e6:.3f}kbit"
    return Nics(
        per_node=(args.ranks_per_node or 1) if args.nic == "rank" else 1,
        GB_s=described.nics.GB_s * scale * PAYLOAD,
        latency_us=NIC_LATENCY_US,
    )
