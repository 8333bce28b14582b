"""The arguments of a model to generate with, from the run or the folder of HuggingFace that has it."""

from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..integration.huggingface.config import is_huggingface, model_flags
from .arguments import complete
from .check_values import ranks_in
from .checkpoint_store import candidates, choose, quick_fault, read_saved_args
from .flags import FLAGS, Arguments, Flags
from .generation_flags import Source

_DECIDES = ("weights", "model", "position table")
_SAVED = ("group_query_attention", "make_vocab_size_divisible_by", "tokenizer_model", "bf16", "fp16")
_OF_TRAINING = ("eod_mask_loss", "reset_attention_mask", "reset_position_ids")


def model_arguments(source: Source) -> Arguments:
    """The arguments of a model for the ranks that were started; those that tensor parallelism leaves share sequences.

    Raises:
        UsageError: there is no model, or it does not go with these ranks.
    """
    ranks, tensor = ranks_in("WORLD_SIZE", 1), source.tensor_model_parallel_size
    if ranks % tensor:
        raise UsageError(f"--tensor-model-parallel-size {tensor}: does not divide the {ranks} ranks started; give 1")
    wanted: dict[str, Any] = {name: getattr(source, name) for name in ("load", "ckpt_step", "load_fallback")}
    foreign = is_huggingface(source.load)
    given = model_flags(Path(source.load)) if foreign else _saved_flags(Flags(**wanted))
    if source.bf16:
        given |= {"bf16": True, "fp16": False}
    context = ranks // tensor
    parallel = {"tensor_model_parallel_size": tensor, "context_parallel_size": context, "cp_layout": "contiguous"}
    # A session deals its tokens itself: of training's sequences only the smallest is described.
    training = {"micro_batch_size": 1, "seq_length": context, "train_iters": 1, "lr": 1.0, "transformer_impl": "local"}
    given |= {**parallel, **training, **wanted}
    return complete(Flags(**given), (given["vocab_size"], None) if foreign else None)[0]


def _saved_flags(asked: Flags) -> dict[str, Any]:
    checkpoint = choose(asked, *candidates(asked), quick_fault, lambda line: None)  # the load tells
    if checkpoint is None:
        why = "neither a run with checkpoints nor a folder of HuggingFace with a config.json"
        raise UsageError(f"--load {asked.load}: {why}; give one, such as --load runs/quickstart")
    saved = read_saved_args(checkpoint)
    taken = [name for name, flag in FLAGS.items() if flag.decides in _DECIDES and name not in _OF_TRAINING]
    found = {name: saved[name] for name in [*taken, *_SAVED] if name in saved}
    if not found.get("group_query_attention"):
        found.pop("num_query_groups", None)  # it follows from the heads
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
