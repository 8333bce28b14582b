"""HuggingFace's Trainer, and trainers made from it such as TRL's SFTTrainer, with our attention."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import EvalLoopOutput

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.accelerate import prepare_without_its_ring

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

    def create_accelerator_and_postprocess(self) -> None:
        """Models with windows are prepared too, which accelerate's own context parallelism refuses."""
        super().create_accelerator_and_postprocess()
        prepare_without_its_ring(self.accelerator)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refuses a trainer with its own training step that does not shard the batch. The Trainer calls it.

        Raises:
            UsageError: each rank computed whole sequences.
        """
        loss = super().training_step(*args, **kwargs)
        if self.cp is None:
            own = self._kind_with("training_step").__name__
            raise UsageError(
                f"{own}: does not shard its batches; use Trainer or SFTTrainer, or leave ContextParallelTrainer out"
            )
        return loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor | Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The loss of a batch of an evaluation, also for trainers whose own step does not shard it, as SFTTrainer's.

        For these it is the mean over the labelled tokens of the batch, by the model's own loss.
        """
        if self._kind_with("prediction_step") is Trainer:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if (kind := getattr(self.args, "loss_type", "nll")) != "nll":
            raise UsageError(f"loss_type {kind}: an evaluation has the loss nll only; give eval_strategy='no'")
        _, batch = self._prepare_context_parallel_inputs(model, self._prepare_inputs(inputs))
        with torch.no_grad(), self.compute_loss_context_manager():
            return model(**batch).loss, None, None

    def _kind_with(self, method: str) -> type:
        """The class behind this one that has a method."""
        kinds = type(self).__mro__
        behind = kinds[kinds.index(ContextParallelTrainer) + 1 :]
        return next(kind for kind in behind if method in vars(kind))

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

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Replaces how the losses of ranks are gathered. The Trainer calls it for `evaluate` and `predict`.

        Raises:
            UsageError: predictions are asked for, not only the loss.
        """
        if not (self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only):
            raise UsageError("predict: a rank has the logits of its own tokens only; call evaluate")
        self.gather_function = self._losses_of_samples
        return super().evaluation_loop(dataloader, description, True, ignore_keys, metric_key_prefix)

    def _losses_of_samples(self, losses: Tensor) -> Tensor:
        """The losses of all samples of a batch, from each rank's [samples].

        The Trainer's own function takes each rank for samples of its own. It cuts off those that fill up the last
        batch, so ranks of a context group were left out.
        """
        assert self.cp is not None  # there was a batch
        of_sequence = losses / self.cp.n
        dist.all_reduce(of_sequence, group=self.cp.group)
        first = self.accelerator.gather(torch.tensor([self.cp.rank == 0], device=losses.device))
        samples = self.accelerator.gather(of_sequence).unflatten(0, (len(first), -1))[first].flatten()
        state = self.accelerator.gradient_state
        return samples[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else samples


def _check_options(trainer: Trainer) -> None:
    """Raises UsageError for what would see a part of a sequence as a whole one."""
    if trainer.label_smoother is not None:
        raise UsageError("label_smoothing_factor: it shifts labels that are sharded; give 0")
    if trainer.neftune_noise_alpha is not None:
        raise UsageError("neftune_noise_alpha: its noise depends on the number of tokens of a rank; leave it out")
    for name in ("compute_loss_func", "compute_metrics"):
        if getattr(trainer, name) is not None:
            raise UsageError(f"{name}: a rank has the logits of its own tokens only; leave it out")
