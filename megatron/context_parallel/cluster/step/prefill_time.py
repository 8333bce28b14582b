"""The time of a prefill on a cluster: new tokens after cached ones, through all layers of a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatron.context_parallel.cluster.description import Cluster, Device
from megatron.context_parallel.cluster.simulate.block_time import rate_at
from megatron.context_parallel.cluster.simulate.collectives import ring
from megatron.context_parallel.cluster.simulate.one_pass import simulate
from megatron.context_parallel.plan.ir import Attend
from megatron.context_parallel.plan.trace import Span
from megatron.context_parallel.plan.volume import Shape
from megatron.context_parallel.strategies import Choice, parse_spec
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask

from .layer_time import LayerTime
from .model_shape import ModelShape
from .train_config import TrainConfig


@dataclass(frozen=True)
class CachedBlock:
    """Seconds of a block whose queries are new tokens and whose keys are mostly cached.

    Each rank has as many new and as many cached tokens as the others, so all blocks take equally long.

    Attributes:
        device: computes it.
        shape: the sizes on a rank.
        pairs: of a query and a key that it sees.
        dtype: of the model, such as "bf16".
    """

    device: Device
    shape: Shape
    pairs: float
    dtype: str

    def __call__(self, attend: Attend) -> float:
        """As long as its operations take, or as reading its keys."""
        shape = self.shape
        keys = self.shape.key_rows or self.shape.rows
        rate = rate_at(self.device, self.dtype, shape.head_dim, False, (shape.rows * keys) ** 0.5, False)
        computed = 4 * shape.heads * shape.head_dim * self.pairs / rate
        read = 2 * keys * shape.kv_heads * shape.head_dim * shape.itemsize / (self.device.memory_GB_s * 1e9)
        return self.device.block_us * 1e-6 + max(computed, read)


@dataclass(frozen=True)
class Prefill:
    """New tokens of one sequence after cached ones.

    Attributes:
        new, cached: tokens of the whole sequence.
        partial_itemsize: bytes of a number of a partial output between ranks.
        through_cache: whether the layers run the path over a cache, also where it is empty.
        choice: the attention, such as `inference.pass_q.RING_PASS_Q`.
    """

    new: int
    cached: int = 0
    partial_itemsize: int = 4
    through_cache: bool = False
    choice: str | Choice = "ring"


class PrefillForecast(NamedTuple):
    """Seconds of a prefill by part, of all layers, and what one layer's attention does (`simulate`).

    Attributes:
        attention: with the communication that it does not hide.
        products, other: products of matrices; all other kernels and launches.
        tensor: tensor-parallel traffic.
        cache: the overhead of using a cache.
        spans: of one layer's attention.
    """

    attention: float
    products: float
    other: float
    tensor: float
    cache: float
    spans: Sequence[Span]

    @property
    def seconds(self) -> float:
        """Until the first token."""
        return self.attention + self.products + self.other + self.tensor + self.cache


@lru_cache(1024)
def prefill_seconds(model: ModelShape, run: TrainConfig, cluster: Cluster, prefill: Prefill) -> PrefillForecast:
    """Predicts a prefill.

    Args:
        model: its sizes.
        run: `seq_length` is that of the new tokens; its context and tensor ranks count.
        cluster: its nodes, as many as the run needs. Rank r is device r; tensor ranks are neighbours.
        prefill: the tokens.
    """
    return _Prefill(model, run, cluster.part(run.world_size), prefill).forecast()


class _Prefill:
    def __init__(self, model: ModelShape, run: TrainConfig, cluster: Cluster, prefill: Prefill) -> None:
        self.model, self.run, self.cluster, self.prefill = model, run, cluster, prefill

    @cached_property
    def shape(self) -> Shape:
        """The attention of a rank."""
        run, prefill = self.run, self.prefill
        heads, kv_heads = (
            max(1, count // run.tensor_model_parallel_size)
            for count in (self.model.num_attention_heads, self.model.num_query_groups)
        )
        keys = (prefill.new + prefill.cached) // run.context_parallel_size
        sizes = run.tokens, heads, kv_heads, self.model.kv_channels, run.itemsize
        return Shape(*sizes, partial_itemsize=prefill.partial_itemsize, key_rows=keys)

    def attention(self) -> tuple[float, Sequence[Span]]:
        run = self.run
        n = self.run.context_parallel_size
        choice = parse_spec(self.prefill.choice, layout="zigzag")
        visible_pairs = Mask(True).pairs(*Chunks.pair("zigzag", n, 2 * n))
        plan = choice.plan(n, visible_pairs=visible_pairs, heads=self.shape.heads, kv_heads=self.shape.kv_heads)
        pairs = run.tokens * (self.prefill.cached + self.prefill.new / 2) / n
        blocks = CachedBlock(self.cluster.device, self.shape, pairs, run.dtype)
        first, *others = run.groups("context")
        forecast = simulate(plan, self.cluster, self.shape, devices=first, others=others, blocks=blocks)
        return forecast.seconds, forecast.spans

    def forecast(self) -> PrefillForecast:
        model, run, cluster = self.model, self.run, self.cluster
        layer = LayerTime(model, run, cluster.device).layer(backward=False)
        hidden = run.tokens * model.hidden_size * run.itemsize
        tensor = 4 * ring(cluster, tuple(run.groups("tensor"))).seconds(hidden)  # two sums of two rings each
        attention, spans = self.attention()
        over_cache = cluster.device.cache_us * 1e-6 if self.prefill.cached or self.prefill.through_cache else 0.0
        other = layer.moving + layer.kernels * cluster.device.kernel_us * 1e-6
        count = model.num_layers
        return PrefillForecast(
            count * attention, count * layer.gemm, count * other, count * tensor, count * over_cache, spans
        )
