"""pass-KV or pass-Q: whether a prefill sends keys and values, or queries and partial outputs.

T new tokens, P cached tokens, n ranks. The formulas are from Yang et al., Context Parallelism for Scalable
Million-Token Inference (2024), except those in `seconds`, which are ours.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron.context_parallel.cluster.description import AttentionRate, Cluster, Device
from megatron.context_parallel.cluster.simulate.links import Links
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.names import SCALE_BYTES

PASS_KV, PASS_Q = "pass-kv", "pass-q"
PASS_Q_PAPER = "pass-q-all-to-all"
CHOICES = (PASS_KV, PASS_Q, PASS_Q_PAPER, "auto", "alg1", "alg5", "empirical")
TILE = 128  # query rows that an attention kernel computes at once, also if it has fewer
EMPIRICAL = (-1.059, 1.145, 12.112)  # Appendix D as printed; it contradicts Table 4, so fit your own constants


@dataclass(frozen=True)
class LayerShape:
    """The attention of a layer on one rank.

    Attributes:
        heads, kv_heads: the heads of this tensor-parallel rank.
        head_dim: of queries and keys; value_dim: of values.
        itemsize: bytes of a number. Partial outputs and their log-sum-exp are sent in at least 4 bytes.
        packed: whether keys and values have 8 bits, and a scale for each row and head.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int
    packed: bool = False

    @property
    def query_bytes(self) -> int:
        """Bytes of a query row."""
        return self.heads * self.head_dim * self.itemsize

    @property
    def key_bytes(self) -> int:
        """Bytes of a row of keys and values."""
        if self.packed:
            return self.kv_heads * (self.head_dim + self.value_dim + 2 * SCALE_BYTES)
        return self.kv_heads * (self.head_dim + self.value_dim) * self.itemsize

    @property
    def partial_bytes(self) -> int:
        """Bytes of a row of partial output and log-sum-exp."""
        return self.heads * (self.value_dim + 1) * max(4, self.itemsize)


@dataclass(frozen=True)
class Rates:
    """The rates of computation, and of communication between neighbours.

    Attributes:
        compute: FLOP/s of one rank's attention.
        bandwidth: bytes per second from a rank to the next one.
        latency: seconds before a message arrives.
        device: computes blocks at its rates for their sizes, in `dtype`; without it, all at the rate `compute`.
    """

    compute: float
    bandwidth: float
    latency: float = 0.0
    device: Device | None = None
    dtype: str = "bf16"

    @classmethod
    def of(cls, cluster: Cluster, n: int, dtype: str = "bf16", head_dim: int = 128, tensor: int = 1) -> "Rates":
        """The rates of n context ranks: the slowest link of the ring, and the fastest measured attention block.

        The `tensor` ranks of each are neighbours on the cluster, and their rings send at the same time.
        """
        part = cluster.part(n * tensor)
        rings = [range(first, n * tensor, tensor) for first in range(tensor)]
        links = Links(part, devices=rings[0], others=rings[1:])
        paths = [links.path(rank, (rank + 1) % n) for rank in range(n)] if n > 1 else []
        crossed = [link for path in paths for link in path.links]
        users = Counter(link.name for link in crossed)
        bandwidth = min((link.rate / users[link.name] for link in crossed), default=math.inf)

        def apart(rate: AttentionRate) -> tuple:
            return rate.dtype != dtype, abs(rate.head_dim - head_dim), -rate.rows

        best = min(part.device.attention, key=apart)
        latency = max((path.seconds for path in paths), default=0.0)
        return cls(best.forward_TFLOP_s * 1e12, bandwidth, latency, part.device, dtype)

    def block(self, rows: float, keys: float, pairs: float, sizes: LayerShape) -> float:
        """Seconds of a block of `rows` queries and `keys`, of which `pairs` are seen.

        On a device, few rows take as long as a tile of them, and a block at least as long as reading its keys.
        """
        computed = 2 * pairs * sizes.heads * (sizes.head_dim + sizes.value_dim)
        if not self.device:
            return computed / self.compute
        from megatron.context_parallel.cluster.simulate.block_time import rate_at  # imports torch, and commands do not

        whole = math.ceil(rows / TILE) * TILE
        rate = rate_at(self.device, self.dtype, sizes.head_dim, False, math.sqrt(whole * keys), False)
        read = keys * sizes.key_bytes / (self.device.memory_GB_s * 1e9)
        return self.device.block_us * 1e-6 + max(computed * whole / rows / rate, read)


def seconds(
    variant: str, new: int, cached: int, n: int, sizes: LayerShape, rates: Rates, window: int | None = None
) -> float:
    """Predicted seconds of one layer's attention, if each step takes the longer of its messages and its block.

    All ranks have the same number of rows; each query sees half of the new tokens. The steps are those of the plans:
    pass-KV is `ring`, pass-Q is `attention2d` on a grid of 1 x n, where partial outputs move along with the queries.
    """
    rows = new / n
    seen = cached + new / 2
    if window is not None:
        cached, seen = min(cached, window), min(seen, window)
    block = rates.block(rows, (cached + new) / n, rows * seen / n, sizes)
    if variant == PASS_KV:
        sent = [(cached + new) / n * sizes.key_bytes] * (n - 1) + [0.0]
    else:
        query, partial = rows * sizes.query_bytes, rows * sizes.partial_bytes
        sent = [query * (s < n - 1) + partial * (s > 1) for s in range(n + 1)]
    hops = ((x / rates.bandwidth + rates.latency) if x else 0.0 for x in sent)
    return sum(max(hop, block * (s < n)) for s, hop in enumerate(hops))


def sent_bytes(variant: str, new: int, cached: int, n: int, sizes: LayerShape) -> float:
    """Bytes that a rank sends in one layer, with `new` and `cached` tokens in total over all ranks."""
    row = sizes.query_bytes + sizes.partial_bytes
    return (n - 1) / n * (new * row if variant == PASS_Q else (new + cached) * sizes.key_bytes)


def algorithm_1(new: int, cached: int, n: int, sizes: LayerShape, rates: Rates) -> str:
    """Algorithm 1: pass-KV if blocks hide it (Eq. 2) or if keys are smaller than queries (Eq. 1)."""
    hidden = new >= n * rates.compute * sizes.kv_heads * sizes.itemsize / (2 * sizes.heads * rates.bandwidth)
    return PASS_KV if hidden or new / (new + cached) >= 2 * sizes.kv_heads / sizes.heads else PASS_Q


def algorithm_5(new: int, cached: int, n: int, sizes: LayerShape, rates: Rates) -> str:
    """Algorithm 5: as algorithm 1, but the all-to-all of pass-Q counts (Eq. 5)."""
    hidden = new >= n * rates.compute * sizes.kv_heads * sizes.itemsize / (2 * sizes.heads * rates.bandwidth)
    all_to_all = 4 * new * rates.bandwidth / (n * rates.compute * sizes.itemsize)
    least = 2 * sizes.kv_heads / sizes.heads - all_to_all
    return PASS_KV if hidden or new / (new + cached) >= least else PASS_Q


def empirical(new: int, cached: int, constants: tuple[float, float, float] = EMPIRICAL) -> str:
    """Appendix D: pass-KV if a log(T) + b log(T / (T + P)) + c is positive; natural logarithms."""
    a, b, c = constants
    return PASS_KV if a * math.log(new) + b * math.log(new / (new + cached)) + c > 0 else PASS_Q


class MeasuredPrefill(NamedTuple):
    """Times of one prefill of `new` tokens with `cached` ones, in total over all sequences; in any unit."""

    new: int
    cached: int
    pass_kv: float
    pass_q: float


def fit_empirical(measured: Sequence[MeasuredPrefill]) -> tuple[float, float, float]:
    """The constants of `empirical` whose h best fits log(pass-Q's time / pass-KV's): least squares.

    If all measurements have the same T + P, the constants hold for it only, and the smallest ones are taken.

    Raises:
        UsageError: fewer than three measurements, or all have the same T.
    """
    import numpy

    known = [[math.log(one.new), math.log(one.new / (one.new + one.cached)), 1.0] for one in measured]
    wanted = [math.log(one.pass_q / one.pass_kv) for one in measured]
    found, _, rank, _ = numpy.linalg.lstsq(numpy.array(known).reshape(-1, 3), numpy.array(wanted), rcond=None)
    if rank < 2 or len(measured) < 3:
        raise UsageError(f"{len(measured)} prefills do not determine three constants; measure more T and more T + P")
    a, b, c = found.tolist()
    return a, b, c


def empirical_loss(of: MeasuredPrefill, constants: tuple[float, float, float]) -> float:
    """How much longer than the faster variant `empirical` takes, as a share of it: 0 if it chooses that variant."""
    taken = of.pass_kv if empirical(of.new, of.cached, constants) == PASS_KV else of.pass_q
    return taken / min(of.pass_kv, of.pass_q) - 1


def has_logarithms(rule: str, rates: Rates | None) -> bool:
    """Whether a choice follows from logarithms: their last digit, and so a tie, may differ between processors."""
    return rule == "empirical" or (rule == "auto" and rates is not None)


def choose_prefill(
    rule: str,
    new: int,
    cached: int,
    n: int,
    sizes: LayerShape,
    rates: Rates | None = None,
    constants: tuple[float, float, float] = EMPIRICAL,
) -> str:
    """The variant for a prefill of `new` tokens with `cached` ones, in total over all sequences.

    Args:
        rule: one of `CHOICES`. `auto` takes the variant with the smaller predicted time; without rates, fewer bytes.
        n: the number of ranks.
        sizes: the sizes of a layer.
        rates: the rates of the cluster; `alg1` and `alg5` need them.
        constants: the constants of `empirical`.

    Raises:
        UsageError: the choice is unknown, or needs rates.
    """
    if rule not in CHOICES:
        raise UsageError(f"--cp-prefill {rule}: unknown; choose one of {', '.join(CHOICES)}")
    if rule in (PASS_KV, PASS_Q, PASS_Q_PAPER):
        return rule
    if rule == "empirical":
        return empirical(new, cached, constants)
    if rule == "auto":
        if rates is None:
            return min((PASS_KV, PASS_Q), key=lambda variant: sent_bytes(variant, new, cached, n, sizes))
        return min((PASS_KV, PASS_Q), key=lambda variant: seconds(variant, new, cached, n, sizes, rates))
    if rates is None:
        raise UsageError(f"--cp-prefill {rule}: needs the rates of a cluster; give --cluster, or --cp-prefill auto")
    return (algorithm_1 if rule == "alg1" else algorithm_5)(new, cached, n, sizes, rates)
