"""The sizes of a published model."""

from pathlib import Path

from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.integration.bridge_recipe import is_recipe, recipe_flags
from megatron.context_parallel.integration.huggingface.config import is_huggingface, model_flags
from megatron.context_parallel.trainer.config.flags import Flags
from megatron.context_parallel.trainer.config.workload import model_from
from megatron.context_parallel.trainer.data.tokenizer import vocabulary

from .command_line import read_flags
from .complete import complete_model, padded_vocab_size


def preset_model(preset: str, seq_length: int, tensor_model_parallel_size: int = 1) -> ModelShape:
    """The sizes of a published model, trained on sequences of `seq_length` tokens.

    Args:
        preset: as `--preset`, a folder with HuggingFace's config.json, or the YAML file of a Megatron-Bridge recipe.
        seq_length, tensor_model_parallel_size: as the trainer's flags.

    Raises:
        UsageError: no such preset, or a config.json or a recipe that the trainer cannot build.
    """
    read = recipe_flags if is_recipe(preset) else model_flags if is_huggingface(preset) else None
    if read:
        sizes = {"seq_length": seq_length, "tensor_model_parallel_size": tensor_model_parallel_size}
        described = complete_model(Flags(**(read(Path(preset)) | sizes)))
        return model_from(described, padded_vocab_size(described, described.vocab_size or 0))
    flags = ["--preset", preset, "--seq-length", str(seq_length), "--max-position-embeddings", str(seq_length)]
    given = read_flags([*flags, "--tensor-model-parallel-size", str(tensor_model_parallel_size)])
    given = complete_model(given)
    return model_from(given, padded_vocab_size(given, given.vocab_size or vocabulary(given)[0]))
