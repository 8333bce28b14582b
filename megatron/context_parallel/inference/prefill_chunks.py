"""How many prompt tokens a step computes, from predicted times.

Every pass reads all weights and sends its messages, so few tokens cost more each. Many delay the texts that are being
generated, and the results of a pass take memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist

from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.cluster.simulate.collectives import ring
from megatron.context_parallel.cluster.step.layer_time import LayerTime
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.train_config import ITEMSIZE, TrainConfig
from megatron.context_parallel.runtime.comm.first_rank import on_first_rank

from .choose import EMPIRICAL, LayerShape, Rates, choose_prefill, seconds

ROWS = 64  # of a rank in the smallest chunk; the others have a power of two as many
NEAR = 1.05  # the smallest chunk is taken whose time for a long prompt is at most this times the shortest
WAIT = 0.1  # seconds that a step with prompts may take while texts are being generated; or twice the smallest one's
LONGEST = 30.0  # seconds of any step; the watch ends a job in which a rank is silent for a minute
MEMORY = 0.5  # share of the memory beside weights and cache for the results of a pass
UNKNOWN = 512  # rows of a rank, where no cluster is described


@dataclass(frozen=True)
class PassTime:
    """Predicts a pass of prompt tokens through all layers.

    Attributes:
        model: its sizes.
        cluster: its nodes, as many as the ranks need.
        n, tensor: context ranks and tensor-parallel ranks.
        dtype: of weights and activations: "bf16", "fp16" or "fp32".
        rule: one of `choose.CHOICES`, what is sent; constants: of `empirical`.
        packed: whether cached keys and values have 8 bits.
    """

    model: ModelShape
    cluster: Cluster
    n: int
    tensor: int = 1
    dtype: str = "bf16"
    rule: str = "auto"
    constants: tuple[float, float, float] = EMPIRICAL
    packed: bool = False

    @cached_property
    def sizes(self) -> LayerShape:
        heads, kv_heads = (
            max(1, count // self.tensor) for count in (self.model.num_attention_heads, self.model.num_query_groups)
        )
        dim = self.model.kv_channels
        return LayerShape(heads, kv_heads, dim, dim, ITEMSIZE[self.dtype], self.packed)

    @cached_property
    def rates(self) -> Rates:
        return Rates.of(self.cluster, self.n, self.dtype, self.model.kv_channels, self.tensor)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row's results in a layer: hidden states, queries and keys, the MLP, float32 partial outputs."""
        model = self.model
        split = model.queries + 2 * model.keys + 3 * model.mlp_width
        return self.sizes.itemsize * (4 * model.hidden_size + split // self.tensor) + 2 * self.sizes.partial_bytes

    def most_rows(self, cached: int) -> float:
        """Rows of a rank whose results fit in its memory, beside the weights and a cache of so many tokens."""
        model, itemsize = self.model, self.sizes.itemsize
        free = self.cluster.device.memory_GiB * 2**30
        free -= itemsize * model.parameters_on_stage(0, tensor=self.tensor)
        free -= model.num_layers * self.sizes.key_bytes * cached / self.n
        return MEMORY * free / self.row_bytes

    def variant(self, new: int, cached: int) -> str:
        """What a pass sends."""
        return choose_prefill(self.rule, new, cached, self.n, self.sizes, self.rates, self.constants)

    def __call__(self, new: int, cached: int) -> float:
        """Seconds of a pass of `new` tokens of a sequence with `cached` ones, in total over all ranks."""
        model, device = self.model, self.cluster.device
        run = self._run(-(-new // self.n) * self.n)
        layer = LayerTime(model, run, device).layer(backward=False)
        other = layer.gemm + layer.moving + (layer.kernels * device.kernel_us + device.cache_us) * 1e-6
        if self.tensor > 1:
            other += 4 * self._sums.seconds(run.tokens * model.hidden_size * run.itemsize)
        variant = self.variant(new, cached)
        whole = model.num_layers if model.window_size is None else model.full_layers
        attention = whole * seconds(variant, new, cached, self.n, self.sizes, self.rates)
        if whole < model.num_layers:
            inside = seconds(variant, new, cached, self.n, self.sizes, self.rates, model.window_size)
            attention += (model.num_layers - whole) * inside
        return attention + model.num_layers * other

    def _run(self, length: int) -> TrainConfig:
        return TrainConfig(
            seq_length=length, context_parallel_size=self.n, tensor_model_parallel_size=self.tensor, dtype=self.dtype
        )

    @cached_property
    def _sums(self):
        run = self._run(self.n)
        return ring(self.cluster.part(run.world_size), tuple(run.groups("tensor")))


def chunk_tokens(time: PassTime, cached: int, most: int, decoding: bool) -> int:
    """Prompt tokens of a step over all ranks.

    Args:
        time: predicts a pass.
        cached: tokens of the prompt that are cached.
        most: tokens that fit in the cache, with the cached ones.
        decoding: whether texts are being generated.
    """
    chunks = [time.n * ROWS]
    span = max(chunks[0], min(most - cached, int(time.n * time.most_rows(most))))
    while chunks[-1] < span:
        chunks.append(min(2 * chunks[-1], span))
    alone = {chunk: time(chunk, cached) for chunk in chunks}

    def total(chunk: int) -> float:
        """Seconds of a prompt's next `span` tokens: the times of equal chunks grow evenly."""
        return span / chunk * (alone[chunk] + time(chunk, cached + span - chunk)) / 2

    totals = {chunk: total(chunk) for chunk in chunks if alone[chunk] <= LONGEST or chunk == chunks[0]}
    shortest = min(totals.values())
    best = min(chunk for chunk, taken in totals.items() if taken <= NEAR * shortest)
    if not decoding:
        return best
    limit = max(WAIT, 2 * alone[chunks[0]])
    return max(chunk for chunk in totals if chunk <= best and alone[chunk] <= limit)


class PrefillChunks:
    """The prompt tokens of a step over all ranks.

    Args:
        table: for each number of binary digits of the cached tokens, from 0 on: the tokens of a step in which no text
            is being generated, and in which some are.
    """

    def __init__(self, table: Sequence[Sequence[int]]) -> None:
        self.table = table
        self.most = max(map(max, table))

    @classmethod
    def fixed(cls, tokens: int) -> "PrefillChunks":
        """Always so many."""
        return cls([(tokens, tokens)])

    @classmethod
    def predicted(cls, time: PassTime, most: int) -> "PrefillChunks":
        """Those of `chunk_tokens`, where `most` tokens fit in the cache."""
        table = []
        for digits in range(most.bit_length() + 1):
            cached = 3 << digits >> 2  # in the middle of the numbers with so many digits
            table.append([chunk_tokens(time, cached, most, decoding) for decoding in (False, True)])
        return cls(table)

    def agreed(self) -> "PrefillChunks":
        """Those of rank 0, on all ranks of the world: predictions of two machines may differ in the last digit."""
        return PrefillChunks(on_first_rank(lambda: self.table)) if dist.is_initialized() else self

    def __call__(self, cached: int, decoding: bool) -> int:
        """The tokens of a step whose longest prompt has so many cached ones."""
        return self.table[min(cached.bit_length(), len(self.table) - 1)][decoding]
