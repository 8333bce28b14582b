"""Converts tiny HuggingFace folders and checkpoints of the trainer in the world of a test, and trains from them."""

from pathlib import Path

from megatron.core import parallel_state

from megatron.context_parallel.commands import convert_hf
from megatron.context_parallel.generation.flags import Source
from megatron.context_parallel.generation.model_source import model_arguments
from megatron.context_parallel.trainer.arguments.command_line import read_flags
from megatron.context_parallel.trainer.checkpoint.store import iteration_directory, read_saved_args
from megatron.context_parallel.trainer.config.flags import FLAGS
from megatron.context_parallel.trainer.setup import initialize_model_parallel
from tests.support import training_case
from tests.support.llama_case import VOCABULARY


def convert(action: str, load: Path, save: Path, *flags: str) -> None:
    """Runs the command in the existing world of one rank."""
    args = model_arguments(Source(load=str(load)))
    initialize_model_parallel(args)
    try:
        if action == "to-megatron":
            convert_hf.write_checkpoint(args, save)
        else:
            asked = convert_hf.PARSER.parse([action, "--load", str(load), "--save", str(save), *flags])
            convert_hf.write_folder(args, asked)
    finally:
        parallel_state.destroy_model_parallel()


def finetune(run: Path, save: Path | None, layout: dict[str, int]) -> list[float]:
    """Losses of 3 steps from converted weights."""
    saved = read_saved_args(iteration_directory(run, 0))
    model = {name: saved[name] for name, flag in FLAGS.items() if flag.decides in ("weights", "model")}
    sizes = {name: saved[name] for name in ("vocabulary", "max_position_embeddings", "group_query_attention")}
    rows = -(-VOCABULARY // 8) * 8  # padded, for any number of tensor-parallel ranks
    where = {"load": str(run), "save": save and str(save), "no_verify_checkpoint": False}
    changes = model | sizes | where | layout | {"padded_vocab_size": rows, "tokenizer_model": None}
    return training_case.train("llama", train_iters=3, finetune=True, **changes).losses


def check_flags_file(run: Path, window: tuple[int, int] | None) -> None:
    """Compares the flags in model.yaml with those in the checkpoint."""
    flags = read_flags(["--config", str(run / "model.yaml")])
    saved = read_saved_args(iteration_directory(run, 0))
    for name, flag in FLAGS.items():
        if flag.decides in ("weights", "model"):
            value = getattr(flags, name)
            assert (list(value) if isinstance(value, tuple) else value) == saved[name], name
    assert flags.window_size == window
    assert flags.bf16 == saved["bf16"]
