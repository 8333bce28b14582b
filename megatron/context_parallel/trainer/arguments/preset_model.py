"""The sizes of a published model."""

from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.trainer.config.workload import model_from
from megatron.context_parallel.trainer.data.tokenizer import vocabulary

from .command_line import read_flags
from .complete import complete_model, padded_vocab_size


def preset_model(preset: str, seq_length: int, tensor_model_parallel_size: int = 1) -> ModelShape:
    """The sizes of a published model (`--preset`), trained on sequences of `seq_length` tokens.

    Raises:
        UsageError: no such preset.
    """
    flags = ["--preset", preset, "--seq-length", str(seq_length), "--max-position-embeddings", str(seq_length)]
    given = read_flags([*flags, "--tensor-model-parallel-size", str(tensor_model_parallel_size)])
    given = complete_model(given)
    return model_from(given, padded_vocab_size(given, given.vocab_size or vocabulary(given)[0]))
