"""Loads a model for generation: the weights of a run of the trainer, or of a HuggingFace folder."""

from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel

from megatron.context_parallel.attention.context import ContextParallel
from megatron.context_parallel.integration.huggingface.config import is_huggingface
from megatron.context_parallel.runtime.comm.first_rank import on_first_rank
from megatron.context_parallel.trainer.checkpoint.save_load import fault_everywhere, read_checkpoint, say
from megatron.context_parallel.trainer.checkpoint.store import choose_checkpoint, loadable_checkpoints
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.model.build import build_gpt, transformer_config


@torch.no_grad()
def load_model(args: Arguments, cp: ContextParallel) -> GPTModel:
    """The model of `--load`, without gradients, in evaluation mode, on this rank's device. Every rank calls it.

    Raises:
        UsageError: the checkpoint or folder is damaged, or does not match `args`; on every rank.
    """
    assert args.load is not None
    config = transformer_config(args)
    config.perform_initialization = False
    model = build_gpt(args, config, cp)
    if torch.cuda.is_available():
        model.cuda(torch.cuda.current_device())
    if is_huggingface(args.load):
        from megatron.context_parallel.integration.huggingface.weights import load_weights  # needs safetensors

        load_weights(model, Path(args.load), args.vocabulary)
    else:
        _load_checkpoint(args, model)
    return model.requires_grad_(False).eval()


def _load_checkpoint(args: Arguments, model: GPTModel) -> None:
    paths, fault = on_first_rank(lambda: loadable_checkpoints(args))
    checkpoint = choose_checkpoint(args, paths, fault, lambda path: fault_everywhere(args, path), say)
    assert checkpoint is not None  # its arguments were read
    loaded = read_checkpoint(args, {"model": model.sharded_state_dict()}, checkpoint)
    model.load_state_dict(loaded["model"])
