"""Inference with a model of megatron-core over a cache that the ranks of a context group share.

All ranks of the group (and of tensor parallelism) make the same calls with the same arguments.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron.context_parallel.attention.api import attention_of_rows
from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.cluster.description import Cluster
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.integration.rope import LayoutRotaryEmbedding
from megatron.context_parallel.integration.spec import AttentionOverride, ContextParallelAttention
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.strategies import Choice

from .batch_layout import BatchLayout
from .cache import KVCache
from .choose import EMPIRICAL, PASS_KV, PASS_Q, PASS_Q_PAPER, LayerShape, Rates, choose_prefill
from .pages import PAGE, PageTables
from .pass_q import RING_PASS_Q
from .recorded import Recorded, record

DECODE = "decode"
OFTEN = 8  # decode steps of as many rows before they are recorded
RECORDINGS = 64  # at most
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # as in a cluster's rates


class Session:
    """Sequences that grow turn by turn. Their keys and values stay in the caches of the ranks.

    Args:
        model: with our attention (`block_spec`, `use_layout`), on one pipeline stage.
        cp: its context group. The strategy of its training does not matter here.
        cache_tokens: tokens that the caches of all ranks hold together, rounded up to pages.
        prefill: what travels in a pass of more than one token a sequence, of `choose.CHOICES`. Passes of one token a
            sequence gather queries and reduce partial outputs.
        cluster: its rates decide `auto`, `alg1` and `alg5`.
        constants: of `empirical`.
        page: rows of a page.

    Raises:
        UsageError: a model or a choice that does not fit.
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
    ) -> None:
        if cache_tokens < 1:
            raise UsageError(f"--cache-tokens {cache_tokens}: give 1 or more, such as {16 * PAGE}")
        self.model, self.cp, self.prefill, self.constants = model, cp, prefill, constants
        self.cores = _cores(model)
        _check(model, self.cores)
        tensor = self.cores[0].pg_collection.tp.size()
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        rope = getattr(model, "rotary_pos_emb", None)
        self._rope = rope if isinstance(rope, LayoutRotaryEmbedding) else None
        self.vocabulary: int = getattr(model, "vocabulary", model.vocab_size)
        attentions = [layer.self_attention for layer in model.decoder.layers]
        shapes = [(a.num_query_groups_per_partition, a.key_hidden_size, a.val_hidden_size) for a in attentions]
        self.sizes = LayerShape(model.config.num_attention_heads // tensor, *shapes[0], self.dtype.itemsize)
        self.rates = Rates.of(cluster, cp.n, DTYPES.get(self.dtype, "fp32"), self.sizes.head_dim) if cluster else None
        self._choose(prefill, 1, 0)
        pages = -(-cache_tokens // (cp.n * page))
        self.tables = PageTables(cp.n, pages, page)
        self.cache = KVCache(pages, page, shapes, self.dtype, self.device)
        grid = f"attention2d:grid=1x{cp.n}"
        specs: dict[str, str | Choice] = {
            PASS_KV: "ring",
            PASS_Q: grid,
            PASS_Q_PAPER: RING_PASS_Q,
            DECODE: f"{grid},overlap=false",
        }
        self._groups = {variant: ContextParallel(spec, group=cp.group) for variant, spec in specs.items()}
        self.variant, self._sequences = DECODE, list[int]()
        # No rank sends anything in a pass, and modules are of PyTorch's operations alone.
        self._silent = cp.n == tensor == 1 and model.config.transformer_impl == "local"
        self._seen, self._recorded = Counter[int](), dict[int, Recorded]()  # by the rows of a decode step

    # -- sequences ---------------------------------------------------------------------------------------------

    def open(self) -> int:
        """A new sequence without tokens: its number."""
        return self.tables.open()

    def fork(self, sequence: int, tokens: int) -> int:
        """A new sequence that begins with the first `tokens` of another, and shares their full pages.

        Raises:
            UsageError: no such sequence, more tokens than it has, or (`CacheFull`) no page for the rest of one.
        """
        self._known(sequence)
        new, copies = self.tables.fork(sequence, tokens)
        if copy := copies[self.cp.rank]:
            self.cache.copy(*copy)
        return new

    def free(self, sequence: int) -> None:
        """Forgets a sequence. Raises UsageError if there is none of that number."""
        self._known(sequence)
        self.tables.free(sequence)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence in the cache. Raises UsageError if there is none of that number."""
        self._known(sequence)
        return self.tables.length(sequence)

    def room(self) -> int:
        """Tokens of one new sequence that fit now."""
        return self.tables.room()

    def _known(self, sequence: int) -> None:
        if sequence not in self.tables:
            raise UsageError(f"sequence {sequence}: not open; give a number that open() or fork() returned")

    # -- passes ------------------------------------------------------------------------------------------------

    def forward(self, new: Mapping[int, Sequence[int]], prefill: str | None = None) -> dict[int, Tensor]:
        """Appends new tokens to sequences, all in one pass: whole prompts, parts of them, and single tokens.

        Args:
            new: for each sequence its new tokens, 1 or more.
            prefill: of `choose.CHOICES`; default: that of the session.

        Returns:
            For each sequence whose last token is on this rank, its logits float32 [vocabulary]. All tensor-parallel
            ranks have them.

        Raises:
            UsageError: an unknown sequence or token, or no tokens; a sequence beyond the model's table of positions;
                (`CacheFull`) tokens that do not fit. The sequences have not changed then.
        """
        self._check_tokens(new)
        counts = {sequence: len(new[sequence]) for sequence in sorted(new)}
        total = sum(counts.values())
        self.variant = DECODE
        if total > len(new):
            cached = sum(map(self.tables.length, counts))
            self.variant = self._choose(prefill or self.prefill, total, cached)
        self.tables.add(counts)
        self._turn = turn = BatchLayout(self.tables, new, self.cp.rank, self.device)
        self._sequences = turn.sequences
        tokens, places = (x if turn.rows else x.new_zeros(1) for x in (turn.tokens, turn.positions))
        wanted = torch.tensor([*turn.last.values()] or [0], device=self.device)
        with torch.no_grad():
            angles = self._rope.at(places, turn.longest) if self._rope else None
            logits = self._run(tokens, places, wanted, angles)
        rows = logits[0, :, : self.vocabulary].float()
        return {sequence: rows[i] for i, sequence in enumerate(turn.last)}

    def share(self, values: Mapping[int, Sequence[float]], width: int = 1) -> dict[int, list[float]]:
        """Tells every rank what the owners of the logits of the last pass made of them.

        Args:
            values: for each sequence whose logits this rank has, `width` numbers. Whole numbers below 2^53 stay exact.

        Returns:
            The numbers of all sequences of the last pass.
        """
        if self.cp.n == 1:
            return {sequence: [*map(float, values.get(sequence, [0.0] * width))] for sequence in self._sequences}
        row = {sequence: i for i, sequence in enumerate(self._sequences)}
        numbers = torch.zeros(len(row), width, dtype=torch.float64)
        for sequence, of in values.items():
            numbers[row[sequence]] = torch.tensor(of, dtype=torch.float64)
        numbers = numbers.to(self.device)
        dist.all_reduce(numbers, group=self.cp.group)
        return dict(zip(row, numbers.tolist(), strict=True))

    def _choose(self, how: str, new: int, cached: int) -> str:
        return choose_prefill(how, new, cached, self.cp.n, self.sizes, self.rates, self.constants)

    def _check_tokens(self, new: Mapping[int, Sequence[int]]) -> None:
        if not new:
            raise UsageError("forward of no sequences: give one or more")
        for sequence, tokens in new.items():
            self._known(sequence)
            if not len(tokens):
                raise UsageError(f"sequence {sequence}: no new tokens; give one or more")
            low, high = min(tokens), max(tokens)
            if low < 0 or high >= self.vocabulary:
                wrong = low if low < 0 else high
                raise UsageError(f"sequence {sequence}: token {wrong}; the vocabulary is 0 to {self.vocabulary - 1}")
            length, most = self.tables.length(sequence) + len(tokens), self.model.max_sequence_length
            if self.model.position_embedding_type == "learned_absolute" and length > most:
                raise UsageError(f"sequence {sequence}: {length} tokens; --max-position-embeddings {most} is the most")

    def _run(self, *inputs: Any) -> Tensor:
        """The logits [1, wanted, vocabulary] of a pass; `inputs` are those of `_through_model`.

        Where nothing is sent and the linear layers have little to do, Python is most of the time of a pass. So passes
        of a shape that comes again and again are recorded.
        """
        rows = len(inputs[0])
        recorded = self._recorded.get(rows) if self.variant == DECODE else None
        if recorded and not recorded.current:
            self._recorded.clear()
            self._seen.clear()
            recorded = None
        if recorded and recorded.checked:
            return recorded(*inputs)
        logits = self._through_model(self._attend, *inputs)
        if recorded:
            recorded.checked = torch.equal(recorded(*inputs), logits)  # the rows of the pass are only written again
            if not recorded.checked:
                del self._recorded[rows]
        elif self._silent and self.variant == DECODE and len(self._recorded) < RECORDINGS:
            self._seen[rows] += 1
            if self._seen[rows] == OFTEN:
                found = record(self.model, self.cores, self._attend, self._through_model, inputs)
                self._recorded |= {rows: found} if found else {}
        return logits

    def _through_model(
        self, attend: AttentionOverride, tokens: Tensor, places: Tensor, wanted: Tensor, angles: Tensor | None
    ) -> Tensor:
        """A pass through the model.

        Args:
            attend: computes the attention of each layer.
            tokens, places: int64 [rows], and their positions.
            wanted: int64 [sequences], the rows whose logits are computed.
            angles: of the rotary embedding, if the model has one.
        """
        with self._installed(attend, wanted, angles):
            return self.model(tokens.unsqueeze(0), places.unsqueeze(0), None, runtime_gather_output=True)

    @contextmanager
    def _installed(self, attend: AttentionOverride, wanted: Tensor, angles: Tensor | None) -> Iterator[None]:
        """The model as it is needed for a pass: over the cache, at given positions, logits of last rows only."""

        def last_rows(_: object, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            return (args[0].index_select(0, wanted), *args[1:]), kwargs

        training = self.model.training
        hook = self.model.output_layer.register_forward_pre_hook(last_rows, with_kwargs=True)
        if self._rope:
            self._rope.angles = angles
        for core in self.cores:
            core.attention_override = attend
        if training:
            self.model.eval()
        try:
            yield
        finally:
            hook.remove()
            if self._rope:
                self._rope.angles = None
            for core in self.cores:
                core.attention_override = None
            if training:
                self.model.train()

    def _attend(self, core: ContextParallelAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The attention of this rank's new rows over all cached rows; [s, 1, heads, d].

        A rank without new rows has one in the model, because layers cannot do without. It is neither query nor key.
        """
        turn = self._turn
        rows, layer = turn.rows, core.layer_number - 1
        kernel = kernel_for(q.device, q.dtype, q.shape[-1], core.backend, value_dim=v.shape[-1])
        blocks, slots = turn.view(core.window, kernel)
        self.cache.append(layer, turn.new_slots, k[:rows, 0], v[:rows, 0])
        keys, values = (x.unsqueeze(1) for x in self.cache.rows(layer, slots))
        inputs = [(q[:rows], keys, values)]
        group = self._groups[self.variant]
        (out,) = attention_of_rows(inputs, group, blocks, scale=core.scale, sinks=core.softmax_offset)
        return out if rows else q.new_zeros(1, *q.shape[1:3], v.shape[-1])


def _cores(model: GPTModel) -> list[ContextParallelAttention]:
    found = [module for module in model.modules() if isinstance(module, ContextParallelAttention)]
    return sorted(found, key=lambda core: core.layer_number)


def _check(model: GPTModel, cores: list[ContextParallelAttention]) -> None:
    """Refuses a model of which a session could not compute the tokens."""
    config = model.config
    if not (model.pre_process and model.post_process):
        raise UsageError(
            f"--pipeline-model-parallel-size {config.pipeline_model_parallel_size}: a pass waits for all ranks of its "
            "context group in each layer, and stages would wait for each other; give 1, and more context ranks"
        )
    if len(cores) != config.num_layers:
        raise UsageError(f"a session needs our attention in all {config.num_layers} layers; build with block_spec")
    if any(core.attn_mask_type is not AttnMaskType.causal for core in cores):
        raise UsageError("a session needs causal attention: keys of later tokens are not there yet")
    if config.sequence_parallel:
        raise UsageError("--sequence-parallel: ranks have any number of rows; leave it out")
    if config.fp8:
        raise UsageError(f"--fp8-format {config.fp8}: ranks have any number of rows, FP8 needs multiples; leave it out")
    if model.position_embedding_type == "rope" and not isinstance(model.rotary_pos_emb, LayoutRotaryEmbedding):
        raise UsageError("the model rotates by megatron-core's positions; call use_layout(model, cp) first")
    if model.position_embedding_type not in ("rope", "learned_absolute", "none"):
        raise UsageError(f"--position-embedding-type {model.position_embedding_type}: give rope or learned_absolute")
