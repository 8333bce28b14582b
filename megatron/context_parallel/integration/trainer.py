"""HuggingFace's Trainer, and trainers made from it such as TRL's SFTTrainer, with our attention."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.errors import UsageError

from .accelerate import use_context_parallel
from .transformers import shard_batch

# What TRL adds for other attention functions; the positions say the same.
_FROM_POSITIONS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


class ContextParallelTrainer(Trainer):
    """A Trainer whose ranks share each sequence. For another trainer: `class Ours(ContextParallelTrainer, SFTTrainer)`.

    Its arguments need `parallelism_config=ParallelismConfig(cp_size=...)` and FSDP2.

    Attributes:
        cp_strategy: `--cp-strategy`.
        cp: the context group, from the first batch on.
    """

    cp_strategy = "mesh"
    cp: ContextParallel | None = None

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: dict[str, Tensor | Any]
    ) -> tuple[Callable, dict[str, Tensor | Any]]:
        """Replaces PyTorch's own sharding. The Trainer calls it for each batch, which all ranks of a group have.

        Raises:
            UsageError: an option that needs whole sequences on a rank, or a batch that `shard_batch` refuses.
        """
        if self.cp is None:
            _check_options(self)
            self.cp = use_context_parallel(self.accelerator, self.cp_strategy, cast(PreTrainedModel, self.model))
        batch = {name: x for name, x in inputs.items() if name not in _FROM_POSITIONS}
        return nullcontext, {**shard_batch(self.cp, batch), "use_cache": False}

    def evaluation_loop(self, *inputs: Any, **named: Any) -> Any:
        """The Trainer's, which else takes each rank's part of a loss for that of another batch."""
        self.gather_function = self._gather_losses
        return super().evaluation_loop(*inputs, **named)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """The Trainer's.

        Raises:
            UsageError: logits are asked for.
        """
        if not prediction_loss_only:
            raise UsageError("predict: a rank has the logits of its own tokens only; call evaluate, for the loss")
        return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _gather_losses(self, losses: Tensor) -> Tensor:
        """The losses of a batch [b of each data rank] from those [b] of each rank, without those that pad the last.

        The mean over a context group is the loss of a data rank.
        """
        assert self.cp is not None  # since the batch was sharded
        first, second = dist.get_process_group_ranks(self.cp.group)[:2]
        by_group = self.accelerator.gather(losses).view(-1, self.cp.n, second - first, len(losses))
        of_batch = by_group[:, :, 0].mean(1).flatten()
        state = self.accelerator.gradient_state
        return of_batch[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else of_batch


def _check_options(trainer: Trainer) -> None:
    """Raises UsageError for what would see a part of a sequence as a whole one."""
    if trainer.label_smoother is not None:
        raise UsageError("label_smoothing_factor: it shifts labels that are sharded; give 0")
    for name in ("compute_loss_func", "compute_metrics"):
        if getattr(trainer, name) is not None:
            raise UsageError(f"{name}: a rank has the logits of its own tokens only; leave it out")
