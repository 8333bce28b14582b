"""Creates an engine from the arguments of a model."""

import sys

from megatron.core import parallel_state

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.inference.choose import EMPIRICAL
from megatron.context_parallel.inference.engine import Engine
from megatron.context_parallel.inference.prefill_chunks import UNKNOWN, PassTime, PrefillChunks
from megatron.context_parallel.inference.session import DTYPES, Session
from megatron.context_parallel.inference.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    Tokenizer,
)
from megatron.context_parallel.integration.huggingface.config import is_huggingface
from megatron.context_parallel.progress import is_first_rank
from megatron.context_parallel.trainer.checkpoint.saved_flags import is_converted, is_of_chats
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.config.workload import model_of
from megatron.context_parallel.trainer.data.tokenizer import BYTES

from .flags import CacheFlags
from .load_model import load_model


def build_engine(args: Arguments, flags: CacheFlags, length: int | None = None) -> Engine:
    """An engine with the model of `args`, on all ranks of the world. Every rank calls it.

    `length` is the maximum number of tokens of a request (default: the positions of the model).

    Raises:
        UsageError: the model or its tokenizer cannot be read; every rank raises the same.
    """
    tokenizer = text_tokenizer(args)
    _warn_of_missing_end(args, tokenizer)
    cp = ContextParallel(args.cp_layers[0], group=parallel_state.get_context_parallel_group())
    model = load_model(args, cp)
    positions = args.max_position_embeddings
    alpha, beta, gamma = flags.cp_prefill_constants or EMPIRICAL
    session = Session(
        model,
        cp,
        cache_tokens=flags.cache_tokens or positions,
        prefill=flags.cp_prefill,
        cluster=load_cluster(flags.cluster) if flags.cluster else None,
        constants=(alpha, beta, gamma),
        kv_cache_dtype=flags.kv_cache_dtype,
        frozen=True,
    )
    length = min(length or positions, positions)
    waste = session.tables.n * session.tables.page
    return Engine(session, tokenizer, _chunks(args, flags, session).agreed(), length, waste)


def _chunks(args: Arguments, flags: CacheFlags, session: Session) -> PrefillChunks:
    """The prompt tokens of a step: given, predicted, or as many for each rank."""
    if flags.inference_dynamic_batching_max_tokens:
        return PrefillChunks.fixed(flags.inference_dynamic_batching_max_tokens)
    if not flags.cluster:
        return PrefillChunks.fixed(UNKNOWN * session.cp.n)
    time = PassTime(
        model_of(args),
        load_cluster(flags.cluster),
        session.cp.n,
        args.tensor_model_parallel_size,
        DTYPES[args.params_dtype],
        flags.cp_prefill,
        session.constants,
        session.sizes.packed,
    )
    return PrefillChunks.predicted(time, session.room())


def _warn_of_missing_end(args: Arguments, tokenizer: Tokenizer) -> None:
    if not (is_first_rank() and isinstance(tokenizer, HuggingFaceTokenizer)):
        return
    if (end := tokenizer.missing_end()) is not None:
        mark = tokenizer.of_transformers.decode([end])
        why = f"its chat template writes {mark!r} after an answer, which ends no text"
        advice = f"add {end} to eos_token_id in generation_config.json"
        print(f"warning: --load {args.load}: {why}; {advice}", file=sys.stderr)


def text_tokenizer(args: Arguments) -> Tokenizer:
    """The tokenizer of the run or folder in `--load`, with the interface that generation needs.

    Raises:
        UsageError: it has none, or its files cannot be read.
    """
    assert args.load is not None
    if is_huggingface(args.load):
        return HuggingFaceTokenizer(args.load, special=True)
    if args.tokenizer_type == "ByteLevelTokenizer":
        return ByteTokenizer(end=BYTES)
    if args.tokenizer_type == "HuggingFaceTokenizer":
        assert args.tokenizer_model is not None
        converted = is_converted(args)  # training adds no special tokens
        return HuggingFaceTokenizer(args.tokenizer_model, special=converted, chats=is_of_chats(args))
    if args.tokenizer_type == "NullTokenizer":
        raise UsageError(f"--load {args.load}: trained with --tokenizer-type NullTokenizer, which has no text")
    assert args.tokenizer_model is not None
    return SentencePieceTokenizer(args.tokenizer_model, args.eod_token)
