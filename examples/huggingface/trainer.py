"""Trains a HuggingFace model with transformers' Trainer on text, or with TRL's SFTTrainer on packed chats.

    python examples/huggingface/small_llama.py runs/llama
    torchrun --nproc-per-node 4 examples/huggingface/trainer.py runs/llama --cp-size 4

    python examples/huggingface/small_chats.py runs/llama runs/chats.jsonl
    torchrun --nproc-per-node 4 examples/huggingface/trainer.py runs/llama --cp-size 2 --chats runs/chats.jsonl

The text is the Python standard library. Ranks that do not share sequences are data-parallel.
"""

import argparse
import json
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Trainer, TrainingArguments

from megatron.context_parallel.integration.trainer import ContextParallelTrainer


def main(argv: list[str] | None = None) -> list[float]:
    """Trains, and returns the losses."""
    args = parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group()
    data_ranks = dist.get_world_size() // args.cp_size
    settings = {
        "output_dir": args.output,
        "per_device_train_batch_size": args.batch_size // data_ranks,
        "max_steps": args.steps,
        "learning_rate": args.lr,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "bf16": torch.cuda.is_available(),
    }
    if not torch.cuda.is_available():
        settings |= on_cpu()
    if args.cp_size > 1:
        settings |= {
            "parallelism_config": ParallelismConfig(dp_shard_size=data_ranks, cp_size=args.cp_size),
            "fsdp": True,  # FSDP2, over all ranks
        }
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    trainer = (chat_trainer if args.chats else text_trainer)(args, settings, model, tokenizer)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a HuggingFace model")
    parser.add_argument("--chats", type=Path, help="file with a chat in each line; default: text")
    parser.add_argument("--output", default="runs/trainer", help="folder of the Trainer; default: %(default)s")
    parser.add_argument("--cp-size", type=int, default=1, help="ranks that share a sequence; default: %(default)s")
    parser.add_argument("--cp-strategy", default="mesh", help="default: %(default)s")
    parser.add_argument("--seq-length", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in a step; default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=1e-3, help="default: %(default)s")
    return parser.parse_args(argv)


def on_cpu() -> dict:
    """Settings for a host without a GPU. accelerate has FSDP for GPUs only, so it is told that there are some."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    if dist.get_world_size() > 1:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return {
        "use_cpu": True,
        "accelerator_config": {"use_configured_state": True},
        "dataloader_pin_memory": False,
    }


def text_trainer(
    args: argparse.Namespace, settings: dict, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase
) -> Trainer:
    text = "".join(path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("ab*.py")))
    rows = torch.tensor(tokenizer(text)["input_ids"]).split(args.seq_length)[:-1]
    data = [{"input_ids": row, "labels": row} for row in rows]

    class TextTrainer(ContextParallelTrainer):
        cp_strategy = args.cp_strategy

    kind = TextTrainer if args.cp_size > 1 else Trainer
    return kind(model=model, args=TrainingArguments(**settings), train_dataset=data)


def chat_trainer(
    args: argparse.Namespace, settings: dict, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase
) -> Trainer:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer, pack_dataset

    class ChatTrainer(SFTTrainer):
        """TRL refuses `packing=True` beside context-parallel ranks, so the chats are packed here, by TRL's function."""

        def _prepare_dataset(self, *inputs: object, **named: object) -> Dataset:
            chats = super()._prepare_dataset(*inputs, **named).select_columns(["input_ids", "labels"])
            return pack_dataset(chats, args.seq_length)

    class SharedChatTrainer(ContextParallelTrainer, ChatTrainer):
        cp_strategy = args.cp_strategy

    settings |= {
        "padding_free": True,  # packed chats are told apart by their positions
        "max_length": None,
        "pad_to_multiple_of": 2 * args.cp_size,
    }
    data = Dataset.from_list([json.loads(line) for line in args.chats.read_text().splitlines()])
    kind = SharedChatTrainer if args.cp_size > 1 else ChatTrainer
    return kind(model=model, args=SFTConfig(**settings), train_dataset=data, processing_class=tokenizer)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
