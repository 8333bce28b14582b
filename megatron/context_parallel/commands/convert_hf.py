"""Convert a HuggingFace model to a checkpoint of the trainer, or a checkpoint to a HuggingFace model.

Supports Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, GPT-OSS and Gemma 3, in safetensors. One weight, or one file of
weights, is in memory at a time.
"""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.convert_hf()

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.cli.run_main import ignore_warnings_of_libraries
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.progress import Progress, gigabytes

if TYPE_CHECKING:
    from megatron.context_parallel.trainer.config.flags import Arguments

TO_HF = "action=to-hf"
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+)(KB|MB|GB)", text)
    if not found or not int(found[1]):
        raise UsageError(f"--max-shard-size {text}: need a size such as 2GB or 500MB")
    return int(found[1]) * _UNITS[found[2]]


class ConvertFlags(FlagSection):
    action: str = flag(
        "to-megatron: convert HuggingFace to a checkpoint for --finetune and tools/generate.py; to-hf: convert a "
        "checkpoint of the trainer to HuggingFace",
        option="ACTION",
        choices=("to-megatron", "to-hf"),
    )
    load: Path = flag(
        "HuggingFace folder with config.json and .safetensors, or the --save directory of a training run",
        unit="DIR",
        example="runs/quickstart",
    )
    save: Path = flag("new directory of checkpoints, or new HuggingFace folder", unit="DIR", example="converted")
    ckpt_step: int | None = flag("iteration to convert", derived="the latest", at_least=0, example=100, needs=TO_HF)
    max_shard_size: int | None = flag(
        "maximum size of a file of weights; one file is in memory at a time",
        derived="2GB",
        unit="SIZE",
        example="2GB",
        read=_size,
        needs=TO_HF,
    )


PARSER = FlagParser(
    ConvertFlags,
    __doc__,
    "ACTION --load DIR --save DIR [flags]",
    [
        "to-megatron --load path/to/Llama-3.1-8B --save runs/llama3",
        "to-hf --load runs/llama3 --save converted --ckpt-step 1000",
    ],
)


def main(argv: list[str] | None = None) -> None:
    """Convert. Raises UsageError if a model cannot be converted, read or written."""
    args = PARSER.parse(argv)
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UsageError(f"WORLD_SIZE={ranks}: the conversion uses one process; start it without torchrun")
    to_megatron = args.action == "to-megatron"
    _check_source(args.load, to_megatron)
    ignore_warnings_of_libraries()
    from megatron.context_parallel.generation.flags import Source
    from megatron.context_parallel.generation.model_source import model_arguments

    source = Source(
        load=str(args.load), ckpt_step=args.ckpt_step, load_fallback=False, tensor_model_parallel_size=1, bf16=False
    )
    ours = model_arguments(source)
    from megatron.context_parallel.trainer.setup import distributed_job  # takes seconds, after the first line

    with distributed_job(ours):
        count = write_checkpoint(ours, args.save) if to_megatron else write_folder(ours, args)
    print(f"{count:,} weights of {args.load} are in {args.save}", flush=True)


def write_checkpoint(args: "Arguments", save: Path) -> int:
    """Convert HuggingFace to a checkpoint, in a world of one rank. Returns the number of weights."""
    from megatron.context_parallel.convert.to_megatron import to_megatron
    from megatron.context_parallel.trainer.model.meta_model import build_meta_model, bytes_of

    model = build_meta_model(args)
    to_megatron(args, model, str(save), Progress("converting weights", bytes_of(model), gigabytes).advance)
    return sum(weight.numel() for weight in model.parameters())


def write_folder(args: "Arguments", asked: ConvertFlags) -> int:
    """Convert a checkpoint to HuggingFace. Returns the number of weights."""
    from megatron.context_parallel.convert.to_huggingface import to_folder
    from megatron.context_parallel.trainer.checkpoint.save_load import fault_everywhere
    from megatron.context_parallel.trainer.checkpoint.store import choose_checkpoint, loadable_checkpoints
    from megatron.context_parallel.trainer.model.meta_model import build_meta_model, bytes_of

    checkpoint = choose_checkpoint(args, *loadable_checkpoints(args), lambda path: fault_everywhere(args, path), print)
    assert checkpoint is not None  # its arguments were read
    model = build_meta_model(args)
    done = Progress("converting weights", bytes_of(model), gigabytes).advance
    to_folder(args, model, checkpoint, asked.save, asked.max_shard_size or _size("2GB"), done)
    return sum(weight.numel() for weight in model.parameters())


def _check_source(folder: Path, foreign: bool) -> None:
    is_foreign = (folder / "config.json").is_file()
    if foreign and not is_foreign:
        raise UsageError(f"--load {folder}: contains no config.json; give a HuggingFace folder")
    if is_foreign and not foreign:
        raise UsageError(f"--load {folder}: already a HuggingFace folder; give the --save of a training run")
