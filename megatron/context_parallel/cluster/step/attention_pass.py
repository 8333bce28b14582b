"""The attention of a run: its plan, the memory of its buffers, and its time on a cluster."""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megatron.context_parallel.attention.plans import ALL_RANKS_UP_TO
from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.cluster.simulate.block_time import MANY_RANKS
from megatron.context_parallel.cluster.simulate.one_pass import PassForecast, simulate
from megatron.context_parallel.cluster.simulate.seen_shares import KEPT_LAYOUTS, small_blocks
from megatron.context_parallel.kernels.aten import TILE, AtenFlash
from megatron.context_parallel.plan.ir import Plan, SwapHeads, T
from megatron.context_parallel.plan.liveness import peak_bytes
from megatron.context_parallel.plan.row_sets import MetRows, RowSets
from megatron.context_parallel.plan.volume import Shape, chunk_bytes
from megatron.context_parallel.runtime.blocks import Blocks
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.slices import Slices

from .block_memory import (
    BlockMemory,
    gradient_swap_bytes,
    packed_bytes,
    partial_gradients_bytes,
    token_rounds_bytes,
)
from .model_shape import ModelShape
from .train_config import ITEMSIZE, TrainConfig

KEPT = 4096  # results that are kept: of a search over other options they are the same
KEPT_PLANS = 128
WHOLE_UP_TO = 2**16  # tokens of a sequence whose blocks are cut as they are


def attention_shape(model: ModelShape, run: TrainConfig) -> Shape:
    """The sizes of the attention of a rank, with the heads that tensor parallelism leaves to it."""
    tensor = run.tensor_model_parallel_size
    heads, kv_heads = model.num_attention_heads // tensor, max(1, model.num_query_groups // tensor)
    sizes = run.tokens, heads, kv_heads, model.kv_channels, run.itemsize
    return Shape(*sizes, partial_itemsize=ITEMSIZE[run.partial_dtype])


def attention_mask(model: ModelShape) -> Mask:
    """The mask of the layers in which a token sees the most: of a model with windows in some layers, the others."""
    window = model.widest_window
    return Mask(True, (-1, -1) if window is None else (window, 0))


def attention_plan(model: ModelShape, run: TrainConfig, backward: bool) -> Plan:
    """The plan of a pass of the attention.

    Raises:
        UsageError: a strategy that does not fit the ranks, the heads or the layout.
    """
    return _plan(*attention_only(model, run), backward)


@lru_cache(KEPT_PLANS)
def _plan(model: ModelShape, run: TrainConfig, backward: bool) -> Plan:
    n = run.context_parallel_size
    choice = parse_spec(run.cp_strategy)
    shape = attention_shape(model, run)
    chunks = Chunks.pair(choice.layout, choice.plan(n).n, run.seq_length)
    visible_pairs = attention_mask(model).pairs(*chunks)
    return choice.plan(n, visible_pairs=visible_pairs, backward=backward, heads=shape.heads, kv_heads=shape.kv_heads)


def attention_rows(plan: Plan, mask: Mask, length: int) -> RowSets | None:
    """The rows that are sent of a sequence of `length` tokens; None: whole chunks.

    Those of a ring of 1,000 ranks take half a minute to find.
    """
    return None if mask.plain else RowSets(plan, _met_rows(mask, plan.layout, plan.n, length))


@lru_cache(KEPT_LAYOUTS)
def _met_rows(mask: Mask, layout: str, n: int, length: int) -> MetRows:
    chunks = Slices.of(Chunks.of(layout, n, length))
    return MetRows(mask, chunks, chunks)


def simulated_rows(plan: Plan, mask: Mask, length: int) -> RowSets | None:
    """The same for a simulation, which has to simulate every rank then: of many ranks whole chunks."""
    return attention_rows(plan, mask, length) if plan.all_ranks <= MANY_RANKS else None


def attention_forecast(
    model: ModelShape, run: TrainConfig, cluster: Cluster, backward: bool, all_up_to: int = MANY_RANKS
) -> PassForecast:
    """Predicts a pass of the attention of one layer and micro batch, of the context group that takes longest.

    All context groups compute at the same time. Rank r of the run is device r of the cluster. `all_up_to`: as in
    `simulate`.
    """
    plan, shape, mask = attention_plan(model, run, backward), attention_shape(model, run), attention_mask(model)
    groups = run.groups("context")
    each = cluster.devices_per_node
    unlike = {}  # groups that lie alike on nodes take equally long
    for group in reversed(groups):
        nodes = tuple(rank // each - group[0] // each for rank in group)
        unlike[nodes] = group
    how = (mask, run.micro_batch_size, run.dtype)
    rows = simulated_rows(plan, mask, run.seq_length)
    forecasts = []
    for group in unlike.values():
        others = [other for other in groups if other != group]
        forecasts.append(simulate(plan, cluster, shape, *how, group, others, all_up_to, rows=rows))
    return max(forecasts, key=lambda forecast: forecast.seconds)


class Attention(NamedTuple):
    """Seconds of a pass: of the busiest rank's blocks, of what they do not hide, and of the swaps of heads.

    Attributes:
        swap: of the swap of queries, keys and values that recomputation repeats.
        swaps: of both swaps that no block hides, before the first round and after the last, with the packing of heads.
    """

    compute: float
    exposed: float
    swap: float
    swaps: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed


def attention_seconds(model: ModelShape, run: TrainConfig, cluster: Cluster, backward: bool) -> Attention:
    """Seconds of one layer and micro batch, as `attention_forecast` predicts. Results are kept."""
    return _seconds(*attention_only(model, run), _attention_cluster(cluster), backward)


@lru_cache(KEPT)
def _seconds(model: ModelShape, run: TrainConfig, cluster: Cluster, backward: bool) -> Attention:
    forecast = attention_forecast(model, run, cluster, backward, all_up_to=1)
    return attention_of(forecast, attention_plan(model, run, backward))


def attention_of(forecast: PassForecast, plan: Plan) -> Attention:
    """The seconds of a predicted pass by kind."""
    swaps = [span for span in forecast.spans if isinstance(span.what[0], SwapHeads)]
    steps = max((span.end for span in forecast.spans if not isinstance(span.what[0], SwapHeads)), default=0.0)
    before = 0.0
    for swap in swaps:
        if swap.step == 0 and {T.KV, T.DO} & {*swap.what[0].tensors}:  # of the first round
            before = max(before, swap.end)
    after = forecast.seconds - steps if swaps else 0.0
    kept = not plan.backward and plan.keeps_swapped
    return Attention(forecast.compute, forecast.exposed, before if kept else 0.0, before + after)


def attention_buffers(model: ModelShape, run: TrainConfig) -> int:
    """Bytes that a pass holds at most, beyond its queries, keys and values. Results are kept."""
    return _buffers(*attention_only(model, run))


@lru_cache(KEPT)
def _buffers(model: ModelShape, run: TrainConfig) -> int:
    shape = attention_shape(model, run)
    most = 0.0
    for backward in (False, True):
        plan = attention_plan(model, run, backward)
        ranks = range(plan.n) if plan.n <= ALL_RANKS_UP_TO else (0, plan.n // 2, plan.n - 1)
        cut = None
        if run.on_cpu:
            cut = _blocks_on_cpu(plan, attention_mask(model), run.seq_length)
        most = max(most, pass_buffers(plan, shape, ranks, cut, TILE * plan.n / run.seq_length))
    return round(most)


def _blocks_on_cpu(plan: Plan, mask: Mask, length: int) -> Blocks:
    """The blocks as ATen's kernel cuts them. Those of a short sequence are too short for the first rows of a window."""
    if mask.plain or length > WHOLE_UP_TO:
        return small_blocks(plan.layout, plan.n, mask, length)
    chunks = Chunks.of(plan.layout, plan.n, length)
    return Blocks(mask, chunks, chunks, AtenFlash())


def pass_buffers(plan: Plan, shape: Shape, ranks: Iterable[int], cut: Blocks | None = None, tile: float = 1.0) -> float:
    """Bytes that a pass holds at most on any of these ranks of the steps, beyond its queries, keys and values.

    `cut` and `tile`: as the `blocks` and `tile` of `BlockMemory`.
    """
    kernels = BlockMemory(plan, shape, cut, tile)
    if plan.backward and plan.token_rounds > 1:
        return token_rounds_bytes(plan, shape, kernels)
    whole = replace(plan, head_rounds=1)
    own = chunk_bytes(whole, T.Q, shape, False) + chunk_bytes(whole, T.KV, shape, False)
    if plan.backward and plan.keeps_swapped:  # also the output gradient as it came
        own -= shape.itemsize * shape.rows * shape.heads * shape.head_dim
    packed, added = packed_bytes(plan, shape), partial_gradients_bytes(plan, shape) if plan.backward else 0
    most = 0.0
    for rank in ranks:
        work = kernels.of_steps(rank) if plan.backward else ()
        most = max(most, peak_bytes(plan, rank, shape, work) + packed + added - own)
    if plan.backward and plan.keeps_swapped:
        most = max(most, gradient_swap_bytes(plan, shape))
    return most


def attention_only(model: ModelShape, run: TrainConfig) -> tuple[ModelShape, TrainConfig]:
    """A model and a run with the same attention, alike for all that differ in nothing else."""
    model = ModelShape(
        num_layers=1,
        hidden_size=1,
        ffn_hidden_size=1,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        padded_vocab_size=1,
        window_size=model.widest_window,
    )
    run = replace(
        run,
        global_batch_size=run.micro_batch_size * run.data_parallel_size,
        virtual_pipeline_model_parallel_size=None,
        sequence_parallel=False,
        data_parallel_sharding_strategy="no_shard",
        num_distributed_optimizer_instances=1,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
        recompute_modules=(),
        recompute_whitelist=(),
        offload_checkpoints=False,
        offload_kept=False,
        offload_modules=(),
    )
    return model, run


def _attention_cluster(cluster: Cluster) -> Cluster:
    """A cluster on which attention takes as long, alike for all that differ in nothing else."""
    return replace(
        cluster, name="", source="", iteration_ms=0.0, device=replace(cluster.device, gemm=None, kernel_us=0.0)
    )
