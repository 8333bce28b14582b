"""torchtitan: the function that shards batches, its changes to attention, and what activation checkpoints save.

Its configuration can select only its own functions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchtitan import trainer
from torchtitan.components import validate
from torchtitan.distributed.activation_checkpoint import SelectiveAC

CHECKED = {"torchtitan": "0.3"}


def cut_batches_with(cut: Callable) -> None:
    """Replaces `prepare_context_parallel_input` with `cut`, in training and in validation."""
    trainer.prepare_context_parallel_input = validate.prepare_context_parallel_input = cut


def model_class(config: Any) -> Any:
    """The class of the model of a config."""
    return config._owner


@contextmanager
def attention_as_it_is(parallelize: Callable) -> Iterator[None]:
    """Prevents a `parallelize_fn` from changing attention with `apply_cp_to_forward`, as partial_dtensor does."""
    names, name = parallelize.__globals__, "apply_cp_to_forward"
    if name not in names:
        yield
        return
    kept, names[name] = names[name], lambda attention_modules, cp_mesh: None
    try:
        yield
    finally:
        names[name] = kept


def save_results_of(operator: Any) -> None:
    """Makes selective activation checkpoints save the results of `operator`, as they save those of FlexAttention."""
    theirs = SelectiveAC.get_save_ops
    if theirs.__module__ != __name__:

        def get_save_ops(self: SelectiveAC) -> set:
            return theirs(self) | {operator}

        SelectiveAC.get_save_ops = get_save_ops
