"""Inference with a megatron-core model and a cache that is sharded over the ranks of a context group.

All ranks of the group (and of tensor parallelism) make the same calls with the same arguments.
"""

import zlib
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.kernels.names import KV_CACHE_DTYPES
from megatron.context_parallel.kernels.to_device import to_device
from megatron.context_parallel.runtime.comm.first_rank import check_alike
from megatron.context_parallel.runtime.comm.host_sockets import Exchange, HostSockets
from megatron.context_parallel.strategies import Choice

from .batch_layout import BatchLayout
from .cache import KVCache
from .cache_attention import CacheAttention
from .cached_model import CachedModel
from .choose import (
    CHOICES,
    EMPIRICAL,
    PASS_KV,
    PASS_Q,
    PASS_Q_PAPER,
    LayerShape,
    Rates,
    choose_prefill,
    has_logarithms,
)
from .decode_attention import DecodeAttention
from .decode_layer import Attention
from .decode_rows import DecodeRows
from .decode_step import DecodeStep, packed_weights, plain_layers
from .heads import Heads
from .pages import PAGE, PageTables
from .pass_q import RING_PASS_Q
from .step_graph import GraphPool

DECODE = "decode"
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # as in a cluster's rates


class Session:
    """Sequences that grow turn by turn. Their keys and values stay in the caches of the ranks.

    Args:
        model: a model with our attention (`block_spec`, `use_layout`), on one pipeline stage.
        cp: its context group. The strategy has no effect here.
        cache_tokens: total tokens in the caches of all ranks, rounded up to pages.
        prefill: which tensors are sent in passes with more than one token per sequence, one of `choose.CHOICES`.
            Passes with one token per sequence gather queries and reduce partial outputs.
        cluster: the cluster whose rates `auto`, `alg1` and `alg5` use.
        constants: the constants of `empirical`.
        page: rows of a page.
        kv_cache_dtype: "auto", the dtype of the model, or "int8" or "fp8": keys and values have 8
            bits in the cache and between ranks, and a scale for each row and head.
        frozen: whether the weights do not change any more. On CPU the session then keeps a packed copy of them. On a
            GPU it does not look whether they were replaced.

    Attributes:
        window: the most tokens before itself that a token sees; None if a layer sees all.
        scored: of the last pass: for each scored sequence with new rows on this rank, their positions, and their logits
            float32 [rows, vocabulary].
        graphs: of decode steps; None: each step launches its kernels. It may be set to None before the first step.

    Raises:
        UsageError: the model is not supported, a choice is invalid, or ranks have others.
    """

    def __init__(
        self,
        model: GPTModel,
        cp: ContextParallel,
        *,
        cache_tokens: int,
        prefill: str = "auto",
        cluster: Cluster | None = None,
        constants: tuple[float, float, float] = EMPIRICAL,
        page: int = PAGE,
        kv_cache_dtype: str = "auto",
        frozen: bool = False,
    ) -> None:
        _check_cache(cache_tokens, kv_cache_dtype)
        self.model = model
        self.cp = cp
        self.prefill = prefill
        self.constants = constants
        self._model = CachedModel(model)
        tensor = self._model.cores[0].pg_collection.tp.size()
        parameter = next(model.parameters())
        self.device, dtype = parameter.device, parameter.dtype
        self.vocabulary: int = getattr(model, "vocabulary", model.vocab_size)
        attentions = [layer.self_attention for layer in model.decoder.layers]
        shapes = [(a.num_query_groups_per_partition, a.key_hidden_size, a.val_hidden_size) for a in attentions]
        form = None if kv_cache_dtype == "auto" else kv_cache_dtype
        heads = model.config.num_attention_heads // tensor
        self.sizes = LayerShape(heads, *shapes[0], dtype.itemsize, form is not None)
        of_ranks = cp.n, DTYPES.get(dtype, "fp32"), self.sizes.head_dim, tensor
        self.rates = Rates.of(cluster, *of_ranks) if cluster else None
        self._choose(prefill, 1, 0)  # raises UsageError if it is unknown
        if cp.n > 1:  # ranks with other plans or pages would wait for each other, or read other rows
            given = {
                "--cp-prefill": prefill,
                "--cp-prefill-constants": constants,
                "--kv-cache-dtype": kv_cache_dtype,
                "--cache-tokens": cache_tokens,
                "rows of a page": page,
                "--cluster": self._cluster_text(cluster),
            }
            check_alike(given, cp.group)
        pages = -(-cache_tokens // (cp.n * page))
        windows = [core.window[0] for core in self._model.cores]
        self.window = max(windows) if min(windows) >= 0 else None
        self.tables = PageTables(cp.n, pages, page, self.window)
        self.cache = KVCache(pages, page, shapes, dtype, self.device, form)
        self._groups = _groups_of_variants(cp)
        self.variant = DECODE
        self.scored: dict[int, tuple[list[int], Tensor]] = {}
        self._sequences: list[int] = []  # in the last pass
        self._sockets = HostSockets.connect(cp.group) if self.device.type == "cpu" else None
        self._heads = Heads(self.sizes.heads, *shapes[0])
        self._layers = plain_layers(self._model)
        self._packed = packed_weights(model, self._layers) if frozen else {}
        self._attentions: dict[int, DecodeAttention] = {}  # by rows of a rank
        self._steps: dict[int, DecodeStep] = {}
        self.graphs = GraphPool(self.device, frozen) if self.device.type == "cuda" else None

    # -- sequences ---------------------------------------------------------------------------------------------

    def open(self) -> int:
        """A new sequence without tokens: its number."""
        return self.tables.open()

    def fork(self, sequence: int, tokens: int) -> int:
        """Creates a sequence that begins with the first `tokens` of another, and shares their full pages.

        Raises:
            UsageError: no such sequence, more tokens than it has, keys that were freed by `trim`, or (`CacheFull`) no
                page to copy the last one.
        """
        self._check_open(sequence)
        new, copies = self.tables.fork(sequence, tokens)
        if copy := copies[self.cp.rank]:
            self.cache.copy(*copy)
        return new

    def free(self, sequence: int) -> None:
        """Frees a sequence. Raises UsageError if there is none with that number."""
        self._check_open(sequence)
        self.tables.free(sequence)

    def trim(self, sequence: int) -> None:
        """Frees the pages of a sequence whose keys no later token of it sees. Only if all layers have windows."""
        self._check_open(sequence)
        self.tables.trim(sequence)

    def holds(self, sequence: int, tokens: int) -> bool:
        """Whether a sequence can be forked after so many tokens: the keys that the next one sees are cached."""
        self._check_open(sequence)
        return self.tables.holds(sequence, tokens)

    def length(self, sequence: int) -> int:
        """The number of cached tokens of a sequence. Raises UsageError if there is none with that number."""
        self._check_open(sequence)
        return self.tables.length(sequence)

    def room(self) -> int:
        """The number of tokens of a new sequence that fit now."""
        return self.tables.room()

    def can_copy(self) -> bool:
        """Whether each rank has a free page, as a fork needs that copies the last ones."""
        return self.tables.can_copy()

    def _check_open(self, sequence: int) -> None:
        if sequence not in self.tables:
            raise UsageError(f"sequence {sequence}: not open; give a number that open() or fork() returned")

    # -- passes ------------------------------------------------------------------------------------------------

    def forward(
        self, new: Mapping[int, Sequence[int]], prefill: str | None = None, scored: Collection[int] = ()
    ) -> dict[int, Tensor]:
        """Appends new tokens to sequences in one pass: whole prompts, parts of them, and single tokens.

        Args:
            new: for each sequence its new tokens, 1 or more.
            prefill: one of `choose.CHOICES`; default: that of the session.
            scored: sequences of which the logits of all new tokens are kept in `self.scored` until the next pass.

        Returns:
            For each sequence whose last token is on this rank, its logits float32 [vocabulary]. All tensor-parallel
            ranks have them.

        Raises:
            UsageError: an unknown sequence or token, no tokens, a sequence beyond the model's table of positions, or
                (`CacheFull`) tokens that do not fit. The sequences have not changed then.
        """
        self._check_tokens(new)
        self._sequences = sorted(new)
        counts = {sequence: len(new[sequence]) for sequence in self._sequences}
        self.scored = {}
        with torch.no_grad():
            if max(counts.values()) > 1:
                return self._prefill(new, counts, prefill or self.prefill, scored)
            logits = self._decode(new, counts)
        for sequence in logits.keys() & scored:
            self.scored[sequence] = [self.tables.length(sequence) - 1], logits[sequence].unsqueeze(0)
        return logits

    def _prefill(
        self, new: Mapping[int, Sequence[int]], counts: dict[int, int], prefill: str, scored: Collection[int]
    ) -> dict[int, Tensor]:
        """A pass by a plan."""
        cached = sum(map(self.tables.length, counts))
        variant = self._choose(prefill, sum(counts.values()), cached)
        if self.cp.n > 1 and has_logarithms(prefill, self.rates):
            chosen = {0: [CHOICES.index(variant)]} if self.cp.rank == 0 else {}
            variant = CHOICES[int(self.share(chosen, of=(0,))[0][0])]
        self.tables.add(counts)
        self.variant = variant
        batch = BatchLayout(self.tables, new, self.cp.rank, self.device, scored)
        attend = CacheAttention(batch, self.cache, self._groups[variant])
        with torch.inference_mode():  # their rotations are not compiled
            angles = self._model.angles(batch.positions, batch.longest)
        if self._packed:
            step = self._new_step(attend, angles, batch.wanted)
            logits = step(batch.tokens, batch.positions, angles)
        else:
            logits = self._model(attend, batch.tokens, batch.positions, angles, batch.wanted)
        rows = logits[:, : self.vocabulary].float()
        first = len(batch.last)
        for sequence, positions in batch.scored.items():
            self.scored[sequence] = positions, rows[first : first + len(positions)]
            first += len(positions)
        return {sequence: rows[i] for i, sequence in enumerate(batch.last)}

    def _decode(self, new: Mapping[int, Sequence[int]], counts: dict[int, int]) -> dict[int, Tensor]:
        """A pass of one token per sequence."""
        dealt = self.tables.add(counts)
        self.variant = DECODE
        rows = DecodeRows(self.tables, new, dealt, self.cp.rank)
        tokens, positions, slots = to_device(rows.inputs, self.device).unbind()
        angles = self._model.angles(positions, rows.longest)
        attend = self._attention(rows.size)
        attend.begin(rows, slots)
        if self._layers:
            step = self._step(attend, angles)
            if not rows.last:
                step.attend_only()
                return {}
            logits = step(tokens, positions, angles)
        else:
            logits = self._model(attend, tokens, positions, angles, attend.everywhere)
        logits = logits[: len(rows.last), : self.vocabulary].to(torch.float32, copy=True)
        return {sequence: logits[row] for sequence, row in rows.last.items()}

    def _attention(self, size: int) -> DecodeAttention:
        if size not in self._attentions:
            dtype = next(self.model.parameters()).dtype
            given = self.cache, self.cp, size, self._heads, self._model.cores, self._sockets, dtype, self.device
            self._attentions[size] = DecodeAttention(*given)
        return self._attentions[size]

    def _step(self, attend: DecodeAttention, angles: Tensor | None) -> DecodeStep:
        if attend.size not in self._steps:
            graphs = self.graphs if attend.can_be_captured else None
            self._steps[attend.size] = self._new_step(attend, angles, graphs=graphs)
        return self._steps[attend.size]

    def _new_step(
        self,
        attend: Attention,
        angles: Tensor | None,
        wanted: Tensor | None = None,
        graphs: GraphPool | None = None,
    ) -> DecodeStep:
        rotary = 0 if angles is None else angles.shape[-1]
        return DecodeStep(self.model, self._layers, attend, rotary, self._packed, wanted, graphs)

    def share(
        self, values: Mapping[int, Sequence[float]], width: int = 1, of: Sequence[int] | None = None
    ) -> dict[int, list[float]]:
        """Sends the results of the owners of the last pass's logits to every rank.

        Args:
            values: for each sequence whose logits this rank has, `width` numbers. Integers below 2^53 stay exact.
                Numbers of several ranks are added.
            of: the sequences; default: all of the last pass.

        Returns:
            The numbers of these sequences.
        """
        sequences = self._sequences if of is None else of
        if self.cp.n == 1:
            return {sequence: [*map(float, values.get(sequence, [0.0] * width))] for sequence in sequences}
        row = {sequence: i for i, sequence in enumerate(sequences)}
        numbers = torch.zeros(len(row), width, dtype=torch.float64)
        for sequence, given in values.items():
            numbers[row[sequence]] = torch.tensor(given, dtype=torch.float64)
        if self._sockets:
            parts = numbers.new_empty(self.cp.n, *numbers.shape)
            parts[self.cp.rank] = numbers
            others = self._sockets.links
            Exchange(self._sockets, dict.fromkeys(others, numbers), {i: parts[i] for i in others}).wait()
            numbers = parts.sum(0)
        else:
            numbers = to_device(numbers, self.device)
            dist.all_reduce(numbers, group=self.cp.group)
        return dict(zip(row, numbers.tolist(), strict=True))

    def _choose(self, how: str, new: int, cached: int) -> str:
        return choose_prefill(how, new, cached, self.cp.n, self.sizes, self.rates, self.constants)

    @staticmethod
    def _cluster_text(cluster: Cluster | None) -> str:
        """The name of the cluster, and a checksum of its description."""
        return f"{cluster.name} ({zlib.crc32(repr(cluster).encode()):08x})" if cluster else "none"

    def _check_tokens(self, new: Mapping[int, Sequence[int]]) -> None:
        if not new:
            raise UsageError("forward of no sequences: give one or more")
        for sequence, tokens in new.items():
            self._check_open(sequence)
            if not len(tokens):
                raise UsageError(f"sequence {sequence}: no new tokens; give one or more")
            low, high = min(tokens), max(tokens)
            if low < 0 or high >= self.vocabulary:
                wrong = low if low < 0 else high
                raise UsageError(f"sequence {sequence}: token {wrong}; the vocabulary is 0 to {self.vocabulary - 1}")
            length = self.tables.length(sequence) + len(tokens)
            most = self.model.max_sequence_length
            if self.model.position_embedding_type == "learned_absolute" and length > most:
                raise UsageError(f"sequence {sequence}: {length} tokens; --max-position-embeddings {most} is the most")


def _check_cache(tokens: int, dtype: str) -> None:
    """Raises UsageError for values of the cache that no session can have."""
    if tokens < 1:
        raise UsageError(f"--cache-tokens {tokens}: give 1 or more, such as {16 * PAGE}")
    if dtype not in KV_CACHE_DTYPES:
        raise UsageError(f"--kv-cache-dtype {dtype}: give one of {', '.join(KV_CACHE_DTYPES)}")


def _groups_of_variants(cp: ContextParallel) -> dict[str, ContextParallel]:
    """The context group with the strategy of each variant of a prefill."""
    grid = f"attention2d:grid=1x{cp.n}"
    specs: dict[str, str | Choice] = {PASS_KV: "ring", PASS_Q: grid, PASS_Q_PAPER: RING_PASS_Q}
    return {variant: ContextParallel(spec, group=cp.group) for variant, spec in specs.items()}
