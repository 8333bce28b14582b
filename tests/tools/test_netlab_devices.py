"""Devices of emulated clusters: their time adds up, and slow motion changes every part of it alike."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace

import pytest

from megatron.context_parallel import UsageError
from megatron.context_parallel.cluster.description import BACKWARD, GemmRate, load_cluster, save_cluster
from megatron.context_parallel.cluster.simulate.block_time import CallTime
from tools.netlab import Busy, Loopback, add_device_flags, add_flags, with_devices
from tools.netlab.devices import COPIES_GB_s, slowed


class Clock:
    """A clock of whole numbers that only moves when told; its sleeps are late by 2."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now

    def pause(self, seconds: int) -> None:
        self.now += seconds + 2


def test_what_a_span_ends_late_the_next_are_shorter():
    clock = Clock()
    busy = Busy(clock, clock.pause)
    ends = []
    for seconds, body in ((10, 0), (10, 3), (1, 0), (10, 0)):
        with busy(seconds):
            clock.now += body
        ends.append(clock.now)
    # 10 and 2 late; until 20, and 2 late; until 21, which is over; until 31, and 2 late.
    assert ends == [12, 22, 22, 33] and busy.late == 2


def test_a_body_that_takes_too_long_is_carried_over():
    clock = Clock()
    busy = Busy(clock, clock.pause)
    with busy(5):
        clock.now += 20
    assert busy.late == 15
    clock.now += 100  # what happens between the spans does not count
    for _ in range(3):
        with busy(5):
            pass
    assert clock.now == 120 and busy.late == 0


@pytest.mark.parametrize("causal,backward", [(True, False), (False, True)])
def test_a_token_stands_for_many(causal, backward):
    """Rows, pairs and launches: a block takes 1 / (scale * tokens) of the time of the longer one."""
    device, scale, tokens = load_cluster("dgx-h100").device, 1e-4, 64
    fast, slow = CallTime(device, "bf16", 128), CallTime(slowed(device, scale, tokens), "bf16", 128)
    for rows, keys in ((8, 8), (48, 48), (200, 700), (4096, 4096)):
        operations = 4e3 * rows * keys * (BACKWARD if backward else 1)
        long = fast(causal, rows * tokens, keys * tokens, operations * tokens**2, backward)
        assert slow(causal, rows, keys, operations, backward) == pytest.approx(long / (scale * tokens))


def test_products_in_slow_motion_and_real_copies():
    device = replace(load_cluster("dgx-h100").device, gemm=(GemmRate(size=4096, TFLOP_s=600),), packing_GB_s=1000)
    slow = slowed(device, scale=0.01, tokens=8)
    assert slow.gemm == (GemmRate(size=2048, TFLOP_s=6),)
    assert slow.memory_GB_s == COPIES_GB_s and slow.packing_GB_s is None
    assert slow.kernel_us == pytest.approx(device.kernel_us * 12.5) and slow.block_us == device.block_us * 12.5


def flags(*words: str) -> Namespace:
    parser = ArgumentParser()
    add_flags(parser)
    add_device_flags(parser)
    return parser.parse_args(words)


def test_the_lab_has_the_links_of_the_devices(tmp_path):
    four_by_two = "--nodes", "4", "--ranks-per-node", "2", "--scale", "1e-4", "--stands-for", "65536"
    place, described = with_devices(flags("--devices", "dgx-h100", *four_by_two), length=1024)
    assert (place.nodes, place.ranks_per_node, place.nic, place.rate) == (4, 2, "rank", 40_000_000)
    assert (described.nodes, described.devices_per_node, described.nics.per_node) == (4, 2, 2)
    assert described.nics.GB_s == pytest.approx(0.005, rel=0.02) and described.buffered_sends
    assert described.device == slowed(load_cluster("dgx-h100").device, 1e-4, 64)
    save_cluster(described, tmp_path / "cluster.yaml")
    assert load_cluster(str(tmp_path / "cluster.yaml")) == described
    place, described = with_devices(flags("--devices", "netlab-4x2", "--nodes", "4", "--ranks-per-node", "2"), 1024)
    assert (place.nic, place.rate, described.nics.per_node) == ("node", 97_000_000, 1)
    place, described = with_devices(flags("--devices", "dgx-h100", "--ranks", "4"), length=1024)
    assert place == Loopback(4) and described.nics is None and described.ranks == 4
    assert with_devices(flags("--ranks", "4"), length=1024) == (Loopback(4), None)


@pytest.mark.parametrize(
    "words,told",
    [
        ("--ranks 4 --scale 1e-4", ["--scale 0.0001", "--devices"]),
        ("--ranks 4 --stands-for 2048", ["--stands-for 2048", "--devices"]),
        ("--ranks 4 --devices dgx-h300", ["--devices dgx-h300", "dgx-h100"]),
        ("--ranks 4 --devices dgx-h100 --scale 0", ["--scale 0.0", "1e-4"]),
        ("--ranks 4 --devices dgx-h100 --stands-for 512", ["--stands-for 512", "1024"]),
        ("--nodes 4 --devices dgx-h100 --node-rate 1gbit", ["--node-rate 1gbit", "leave it out"]),
        ("--nodes 4 --devices loongtrain", ["--devices loongtrain", "4 nics for 8 devices"]),
    ],
)
def test_mistakes(words, told):
    with pytest.raises(UsageError) as caught:
        with_devices(flags(*words.split()), length=1024)
    assert all(word in str(caught.value) for word in told), str(caught.value)
