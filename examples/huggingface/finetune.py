"""Trains a HuggingFace Llama with context parallelism and FSDP2 on text, as bytes.

    torchrun --nproc-per-node 4 examples/huggingface/finetune.py

Without --model it creates a small one with random weights. Without --text it reads the Python standard library.
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from megatron.context_parallel import ContextParallel
from megatron.context_parallel.integration.transformers import register, shard_batch

BYTES = 256


def main(argv: list[str] | None = None) -> list[float]:
    """Trains, and returns the losses."""
    args = parse_args(argv)
    if not dist.is_initialized():
        dist.init_process_group()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)  # else NCCL takes the first GPU on every rank
    model = load(args.model, args.seq_length).to(device)
    cp = ContextParallel(args.cp_strategy)  # all ranks share each sequence
    register(cp, model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = []
    for step, tokens in zip(range(args.steps), batches(args), strict=False):
        batch = shard_batch(cp, {"input_ids": tokens.to(device), "labels": tokens.to(device)})
        loss = model(**batch, use_cache=False).loss
        loss.backward()  # FSDP averages gradients over the ranks, as shard_batch expects
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        losses.append(mean.item())
        if dist.get_rank() == 0:
            print(f"step {step + 1:3}  loss {losses[-1]:.4f}")
    return losses


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a HuggingFace model; default: a small Llama")
    parser.add_argument("--text", type=Path, help="file; default: modules of the Python standard library")
    parser.add_argument("--cp-strategy", default="mesh", help="default: %(default)s")
    parser.add_argument("--seq-length", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=3e-3, help="default: %(default)s")
    return parser.parse_args(argv)


def load(folder: Path | None, length: int) -> PreTrainedModel:
    torch.manual_seed(0)  # the same weights on every rank
    if folder:
        return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 8}
    sizes |= {"head_dim": 64}  # kernels of a GPU have no smaller one
    config = LlamaConfig(vocab_size=BYTES, num_key_value_heads=4, max_position_embeddings=length, **sizes)
    return AutoModelForCausalLM.from_config(config)


def batches(args: argparse.Namespace) -> Iterator[Tensor]:
    """Sequences int64 [1, length], the same on every rank."""
    paths = [args.text] if args.text else sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py"))
    data = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
    for start in range(0, len(data) - args.seq_length, args.seq_length):
        yield data[start : start + args.seq_length].long()[None]


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
