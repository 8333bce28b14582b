"""Finds the changes of a run that make it fit a device: each is tried with the memory model."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.strategies import parse_spec

from .attention_pass import attention_plan
from .memory import fullest
from .mlp_chunks import mlp_chunks
from .model_shape import ModelShape
from .train_config import FULL_RECOMPUTE, FULL_RECOMPUTE_FLAGS, SHARDING, TrainConfig, loss_chunk, sharding_flags

MLP_CHUNKS = (4, 16)
HEAD_ROUNDS = (4, 8, 16)
MOST_RANKS = 1024  # of a context group


class Change(NamedTuple):
    """A change of a run: the flags of the trainer that make it, and the fields that they set."""

    flags: str
    fields: dict[str, Any]


def bytes_needed(model: ModelShape, run: TrainConfig) -> int:
    """The most bytes on a rank of the fullest stage."""
    return fullest(model, run)[1].bytes


def advice(model: ModelShape, run: TrainConfig, room: float) -> str:
    """The flags with which a run needs at most `room` bytes on each rank."""
    changes = changes_to_fit(model, run, room)
    if changes is None:
        tried = "recomputation, chunks, sharding, context ranks and host memory"
        return f"{tried} are not enough: split the model over more ranks"
    for change in changes:
        run = replace(run, **change.fields)
    flags = " ".join(change.flags for change in changes)
    return f"it would fit with {flags} ({bytes_needed(model, run) / 2**30:.3g} GiB)"


def changes_to_fit(model: ModelShape, run: TrainConfig, room: float) -> list[Change] | None:
    """The first changes with which a rank needs at most `room` bytes, in the order of the kinds below.

    Of several strengths of one kind the first that suffices is taken, else the one that needs the least. None: they
    are not enough.
    """
    kept: list[Change] = []
    least = bytes_needed(model, run)
    for kind in (_recomputations, _loss_chunks, _mlp_chunks, _head_rounds, _shardings, _ranks, _offloading):
        if least <= room:
            break
        best = None
        for change in kind(model, run):
            try:
                needed = bytes_needed(model, replace(run, **change.fields))
            except UsageError:  # sizes that do not fit each other
                continue
            if needed < least:
                best, least = change, needed
            if needed <= room:
                break
        if best:
            kept.append(best)
            run = replace(run, **best.fields)
    return kept if least <= room else None


def _recomputations(model: ModelShape, run: TrainConfig) -> Iterator[Change]:
    if run.recompute_granularity != "full":
        flags = f"{FULL_RECOMPUTE_FLAGS} --recompute-whitelist core_attention"
        yield Change(flags, FULL_RECOMPUTE | {"recompute_whitelist": ("core_attention",)})
    if run.recompute_granularity != "full" or run.recompute_whitelist:
        yield Change(FULL_RECOMPUTE_FLAGS, FULL_RECOMPUTE | {"recompute_whitelist": ()})


def _loss_chunks(model: ModelShape, run: TrainConfig) -> Iterator[Change]:
    chunk = loss_chunk(model.padded_vocab_size // run.tensor_model_parallel_size)
    if chunk < run.tokens_of_loss:
        yield Change(f"--cross-entropy-chunk-size {chunk}", {"cross_entropy_chunk_size": chunk})


def _mlp_chunks(model: ModelShape, run: TrainConfig) -> Iterator[Change]:
    for chunks in MLP_CHUNKS:
        if not model.num_experts and chunks > mlp_chunks(model, run):
            yield Change(f"--mlp-chunks-for-training {chunks}", {"mlp_chunks_for_training": chunks})


def _head_rounds(model: ModelShape, run: TrainConfig) -> Iterator[Change]:
    if attention_plan(model, run, True).keeps_swapped:
        for rounds in HEAD_ROUNDS:
            spec = parse_spec(parse_spec(run.cp_strategy), head_rounds=rounds).spec
            yield Change(f"--cp-head-rounds {rounds}", {"cp_strategy": spec})


def _shardings(model: ModelShape, run: TrainConfig) -> Iterator[Change]:
    if run.sharers == 1 or run.use_torch_fsdp2:
        return
    now = run.data_parallel_sharding_strategy
    whole_experts = model.expert_model_parallel_size == 1  # no FSDP was tested with sharded ones
    for sharding in SHARDING[SHARDING.index(now) + 1 :]:
        if sharding == SHARDING[1] or (whole_experts and run.fits_megatron_fsdp):
            yield Change(sharding_flags(sharding), {"data_parallel_sharding_strategy": sharding})
    if whole_experts and run.fits_fsdp2 and now != SHARDING[1]:
        fsdp2 = {"data_parallel_sharding_strategy": SHARDING[-1], "use_torch_fsdp2": True}
        instead = "" if now == SHARDING[0] else " instead of --use-megatron-fsdp"
        yield Change(sharding_flags(SHARDING[-1], fsdp2=True) + instead, fsdp2)


def _ranks(model: ModelShape, run: TrainConfig) -> Iterator[Change]:
    ranks = 2 * run.context_parallel_size
    while ranks <= MOST_RANKS:
        yield Change(f"--context-parallel-size {ranks}", {"context_parallel_size": ranks})
        ranks *= 2


def _offloading(model: ModelShape, run: TrainConfig) -> Iterator[Change]:
    """What moves to host memory: the checkpoints of layers, then the optimizer too."""
    flags, fields = "", dict[str, Any]()
    if run.recompute_granularity == "full" and not run.fp8 and not run.offload_checkpoints:
        flags, fields = "--offload-checkpoints ", {"offload_checkpoints": True}
        yield Change(flags.strip(), fields)
    sharding = run.data_parallel_sharding_strategy
    if run.on_cpu or run.optimizer_cpu_offload:
        return
    if run.use_torch_fsdp2 and run.tensor_model_parallel_size == 1:
        yield Change(f"{flags}--optimizer-cpu-offload", fields | {"optimizer_cpu_offload": True})
    if run.dtype != "bf16" or sharding not in SHARDING[:2]:
        return
    if sharding == SHARDING[0]:
        flags += "--use-distributed-optimizer "
        fields = fields | {"data_parallel_sharding_strategy": SHARDING[1]}
    flags += "--optimizer-cpu-offload --use-precision-aware-optimizer"
    yield Change(flags, fields | {"optimizer_cpu_offload": True})
