"""The model flags that a checkpoint was saved with."""

from typing import Any

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.config.flags import FLAGS, Flags

from .store import choose_checkpoint, loadable_checkpoints, quick_fault, read_saved_args

_DECIDES = ("weights", "model", "position table")
_SAVED = ("group_query_attention", "make_vocab_size_divisible_by", "tokenizer_model", "seq_length")
_OF_TRAINING = ("eod_mask_loss", "reset_attention_mask", "reset_position_ids")


def saved_flags(asked: Flags, *others: str) -> dict[str, Any]:
    """The model flags in the checkpoint of `--load`, and those named by `others`, by field.

    Raises:
        UsageError: there is no checkpoint, or it is damaged.
    """
    saved = _saved(asked)
    taken = [name for name, flag in FLAGS.items() if flag.decides in _DECIDES and name not in _OF_TRAINING]
    found = {name: saved[name] for name in [*taken, *_SAVED, *others] if name in saved}
    if not found.get("group_query_attention"):
        found.pop("num_query_groups", None)  # it follows from the heads
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def is_converted(asked: Flags) -> bool:
    """Whether the checkpoint of `--load` was converted from another format, and not trained since."""
    return "converted_from" in _saved(asked)


def is_of_chats(asked: Flags) -> bool:
    """Whether the checkpoint of `--load` was trained with `--sft`."""
    return bool(_saved(asked).get("sft"))


def _saved(asked: Flags) -> dict[str, Any]:
    checkpoint = choose_checkpoint(
        asked, *loadable_checkpoints(asked), quick_fault, lambda line: None
    )  # the load tells
    if checkpoint is None:
        why = "contains neither checkpoints of a run nor a HuggingFace model with a config.json"
        raise UsageError(f"--load {asked.load}: {why}; give one, such as --load runs/quickstart")
    return read_saved_args(checkpoint)
