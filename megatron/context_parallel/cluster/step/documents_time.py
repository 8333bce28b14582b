"""The attention of a micro batch of packed documents, in a static layout or in a placement of its own.

A block takes the time of its visible pairs, at the kernel's rate for causal blocks of `RATE_ROWS` rows. So what kernels
lose with short documents counts against no layout. Messages are simulated, with the rows that are sent.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megatron.context_parallel.attention.plans import ALL_RANKS_UP_TO, ROWS_UP_TO
from megatron.context_parallel.cluster.description import BACKWARD, Cluster
from megatron.context_parallel.cluster.simulate.block_time import rate_at
from megatron.context_parallel.cluster.simulate.one_pass import simulate
from megatron.context_parallel.plan.ir import Attend, Plan
from megatron.context_parallel.plan.row_sets import RowSets
from megatron.context_parallel.plan.volume import Shape, received_bytes
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Documents, Mask
from megatron.context_parallel.tokens.place_documents import place
from megatron.context_parallel.tokens.slices import Slices

from .attention_pass import attention_mask, attention_shape
from .model_shape import ModelShape
from .placement_costs import costs_of_run
from .train_config import TrainConfig

RATE_ROWS = 8192


class DocumentsForecast(NamedTuple):
    """Both passes of the attention of one layer.

    Attributes:
        work: visible pairs of the busiest rank, of the mean.
        received: bytes of the rank that receives most.
        seconds: until the last rank has its results.
    """

    work: float
    received: int
    seconds: float


def documents_forecast(
    model: ModelShape, run: TrainConfig, cluster: Cluster, documents: Documents, placed: bool
) -> DocumentsForecast:
    """Predicts the attention of a micro batch, if all context groups compute the like at the same time.

    Rank r of the run is device r of the cluster.

    Args:
        model, run: the attention and its strategy, `run.cp_strategy`.
        cluster: at least as many devices as the run has ranks.
        documents: of the micro batch, [samples, length].
        placed: the documents get a placement of their own. Otherwise tokens lie as the strategy's layout says.
    """
    n, choice, shape = run.context_parallel_size, parse_spec(run.cp_strategy), attention_shape(model, run)
    steps_on = choice.plan(n).n
    mask = attention_mask(model)
    if placed:
        placement = place(documents, steps_on, costs_of_run(model, run, cluster), mask.causal, [mask.window])
        chunks: Slices = placement
        mask = replace(mask, documents=documents.placed(placement))
        seen = visible_pairs = mask.pairs(placement, placement)
    else:
        pair = Chunks.pair(choice.layout, steps_on, run.seq_length)
        chunks = Slices.of(pair[0])
        without, mask = mask, replace(mask, documents=documents)
        seen = mask.pairs(*pair)
        visible_pairs = seen if steps_on <= ALL_RANKS_UP_TO else without.pairs(*pair)  # as plans are made
    pairs = pair_counts(mask, chunks, seen)
    group, *others = run.groups("context")
    received = np.zeros(n, np.int64)
    seconds = 0.0
    for backward in (False, True):
        plan = choice.plan(
            n, visible_pairs=visible_pairs, backward=backward, heads=shape.heads, kv_heads=shape.kv_heads
        )
        rows = RowSets(plan, mask, chunks, chunks) if placed or steps_on <= ROWS_UP_TO else None
        received += [received_bytes(plan, rank, shape, rows) for rank in range(n)]
        blocks = _block_seconds(cluster, plan, shape, run.dtype, pairs)
        devices = cluster.part(run.world_size)
        forecast = simulate(plan, devices, shape, mask, devices=group, others=others, blocks=blocks, rows=rows)
        seconds += forecast.seconds
    of_ranks = pairs.sum(1)
    return DocumentsForecast(float(of_ranks.max() / of_ranks.mean()), int(received.max()), seconds)


def pair_counts(mask: Mask, chunks: Slices, seen: Pairs) -> np.ndarray:
    """The visible pairs of a row of each query chunk and of each key chunk, of all samples: int64 [n, n]."""
    counts = np.zeros((chunks.n, chunks.n), np.int64)
    for q in range(chunks.n):
        first, end = (bound.numpy() for bound in mask.seen(chunks.positions(q)))
        end = np.maximum(first, end)
        for kv in range(chunks.n):
            if seen(q, kv):
                counts[q, kv] = (chunks.before((kv,), end) - chunks.before((kv,), first)).sum()
    return counts


def _block_seconds(
    cluster: Cluster, plan: Plan, shape: Shape, dtype: str, pairs: np.ndarray
) -> Callable[[Attend], float]:
    rate = rate_at(cluster.device, dtype, shape.head_dim, True, RATE_ROWS, plan.backward)
    width = shape.head_dim + (shape.value_dim or shape.head_dim)
    operations = 2 * width * shape.heads / plan.head_parts * (BACKWARD if plan.backward else 1.0)

    def seconds(block: Attend) -> float:
        return float(pairs[np.ix_(block.q_chunks, block.kv_chunks)].sum()) * operations / rate

    return seconds
