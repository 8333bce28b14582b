"""The attention of a micro batch of packed documents, in a static layout or in a placement of its own.

A block takes the time of its visible pairs, at the kernel's rate for causal blocks of `RATE_ROWS` rows. So what kernels
lose with short documents counts against no layout. Messages are simulated, with the rows that are sent.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from megatron.context_parallel.attention.plans import ALL_RANKS_UP_TO, ROWS_UP_TO
from megatron.context_parallel.cluster.description import BACKWARD, Cluster
from megatron.context_parallel.cluster.simulate.block_time import rate_at
from megatron.context_parallel.cluster.simulate.one_pass import simulate
from megatron.context_parallel.plan.ir import Attend, Plan
from megatron.context_parallel.plan.row_sets import MetRows, RowSets
from megatron.context_parallel.plan.volume import Shape, received_bytes
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.chunk_loads import pairs_between
from megatron.context_parallel.tokens.chunk_pairs import Pairs
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.place_documents import Costs, place
from megatron.context_parallel.tokens.slices import Slices

from .attention_pass import Attention, attention_mask, attention_of, attention_only, attention_shape
from .model_shape import ModelShape
from .placement_costs import costs_of_run
from .train_config import TrainConfig

RATE_ROWS = 8192
KEPT = 32  # ways in which the tokens of a micro batch lie: strategies share them


class DocumentsForecast(NamedTuple):
    """Both passes of the attention of one layer.

    Attributes:
        work: visible pairs of the busiest rank, of the mean.
        received: bytes of the rank that receives most.
        passes: the time of the forward and of the backward pass.
    """

    work: float
    received: int
    passes: tuple[Attention, Attention]

    @property
    def seconds(self) -> float:
        """Until the last rank has its results."""
        return sum(of.seconds for of in self.passes)


class DocumentsAttention:
    """The attention of micro batches of these documents, for `forecast_step`. Results are kept.

    Args:
        documents, placed: as in `documents_forecast`.
    """

    def __init__(self, documents: Documents, placed: bool) -> None:
        self.documents, self.placed = documents, placed
        self._known: dict[tuple[ModelShape, TrainConfig, Cluster], DocumentsForecast] = {}

    def __call__(self, model: ModelShape, run: TrainConfig, cluster: Cluster, backward: bool) -> Attention:
        case = *attention_only(model, run), cluster
        if case not in self._known:
            self._known[case] = documents_forecast(*case, self.documents, self.placed)
        return self._known[case].passes[backward]


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
    step_ranks = choice.plan(n).n
    mask = attention_mask(model)
    if placed:
        split = _placed(documents, mask, step_ranks, costs_of_run(model, run, cluster))
    else:
        split = _static(documents, mask, step_ranks, choice.layout, run.seq_length)
    met, visible_pairs, pairs = split
    group, *others = run.groups("context")
    received = np.zeros(n, np.int64)
    passes = []
    for backward in (False, True):
        plan = choice.plan(
            n, visible_pairs=visible_pairs, backward=backward, heads=shape.heads, kv_heads=shape.kv_heads
        )
        plan = replace(plan, token_rounds=1)  # as `Plans` does for documents
        rows = RowSets(plan, met) if placed or step_ranks <= ROWS_UP_TO else None
        received += [received_bytes(plan, rank, shape, rows) for rank in range(n)]
        blocks = _block_seconds(cluster, plan, shape, run.dtype, pairs)
        devices = cluster.part(run.world_size)
        forecast = simulate(plan, devices, shape, met.mask, devices=group, others=others, blocks=blocks, rows=rows)
        passes.append(attention_of(forecast, plan))
    of_ranks = pairs.sum(1)
    return DocumentsForecast(float(of_ranks.max() / of_ranks.mean()), int(received.max()), (passes[0], passes[1]))


class _Split(NamedTuple):
    """How the tokens of a micro batch lie on ranks.

    Attributes:
        met: the rows of its chunks that meet, under the mask with the documents.
        visible_pairs: those that a plan is made for.
        pairs: visible pairs of a row of each query chunk and of each key chunk: int64 [n, n].
    """

    met: MetRows
    visible_pairs: Pairs
    pairs: np.ndarray


@lru_cache(KEPT)
def _placed(documents: Documents, mask: Mask, n: int, costs: Costs) -> _Split:
    placement = place(documents, n, costs, mask.causal, [mask.window])
    mask = replace(mask, documents=documents.placed(placement))
    met = MetRows(mask, placement, placement)
    return _Split(met, mask.pairs(placement, placement), pairs_between(mask, placement))


@lru_cache(KEPT)
def _static(documents: Documents, mask: Mask, n: int, layout: str, length: int) -> _Split:
    pair = Chunks.pair(layout, n, length)
    without, mask = mask, replace(mask, documents=documents)
    visible_pairs = (mask if n <= ALL_RANKS_UP_TO else without).pairs(*pair)  # as plans are made
    chunks = Slices.of(pair[0])
    return _Split(MetRows(mask, chunks, chunks), visible_pairs, pairs_between(mask, pair[0]))


def _block_seconds(
    cluster: Cluster, plan: Plan, shape: Shape, dtype: str, pairs: np.ndarray
) -> Callable[[Attend], float]:
    rate = rate_at(cluster.device, dtype, shape.head_dim, True, RATE_ROWS, plan.backward)
    width = shape.head_dim + (shape.value_dim or shape.head_dim)
    operations = 2 * width * shape.heads / plan.head_parts * (BACKWARD if plan.backward else 1.0)

    def seconds(block: Attend) -> float:
        return float(pairs[np.ix_(block.q_chunks, block.kv_chunks)].sum()) * operations / rate

    return seconds
