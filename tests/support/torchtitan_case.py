"""torchtitan's own trainer on a CPU: a small Llama on documents of any length, a few steps, the losses of each."""

import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

from megatron.context_parallel.tokens.place_documents import Costs, place

LENGTH, BATCH, VOCABULARY, STEPS = 64, 2, 256, 5


@cache
def on_cpu() -> None:
    """Imports torchtitan, with answers to its questions about a GPU."""
    sys.path.append(os.environ.get("TORCHTITAN_PATH", ""))
    torch._utils._get_available_device_type, kept = lambda: "cpu", torch._utils._get_available_device_type
    torch.cpu.get_device_name = lambda device=None: "cpu"
    torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 30)
    torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda *given: None
    torch.cpu.memory_stats = lambda device=None: {}
    try:
        from torchtitan.models.common import attention
    finally:
        torch._utils._get_available_device_type = kept
    attention.FlexAttention._compiled_flex_attn = staticmethod(flex_attention)


def flex_attention(q, k, v, *, block_mask, scale, enable_gqa, **others) -> tuple[torch.Tensor, None]:
    """PyTorch's has no backward pass on a CPU. The mask is torchtitan's."""
    mask = create_mask(block_mask.mask_mod, len(q), None, q.shape[2], k.shape[2], q.device)
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None


def config(degree: int, model: str = "llama3", **parallelism):
    """Of a small model, without validation, checkpoints and graphs."""
    on_cpu()
    from importlib import import_module

    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    class Words(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config, **others) -> None:
            super().__init__()

        def encode(self, *given, **others) -> list[int]:
            return []

        def decode(self, *given, **others) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class Documents(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **others) -> None:
            self.mine = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)

        def __iter__(self) -> Iterator:
            torch.manual_seed(5)
            while True:
                tokens = torch.randint(32, (BATCH, LENGTH + 1)) * 7
                labels = tokens[:, 1:].masked_fill(torch.rand(BATCH, LENGTH) < 0.2, -100)
                places = torch.stack([documents(17, 1, 30), documents(50)])
                yield {"input": tokens[self.mine, :-1], "positions": places[self.mine]}, labels[self.mine]

        def state_dict(self) -> dict:
            return {}

        def load_state_dict(self, state: dict) -> None:
            pass

    spec = import_module(f"torchtitan.models.{model}").model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    data = parallelism.get("data_parallel_shard_degree", 1) * parallelism.get("data_parallel_replicate_degree", 1)
    made = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        tokenizer=Words.Config(),
        dataloader=Documents.Config(),
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(
            local_batch_size=BATCH // data,
            seq_len=LENGTH,
            steps=STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=ParallelismConfig(context_parallel_degree=degree, **parallelism),
        dump_folder=tempfile.gettempdir(),
    )
    made.metrics.log_freq = 1
    made.comm.trace_buf_size = 0
    return made


def documents(*lengths: int) -> torch.Tensor:
    """Positions of documents that fill a sequence, int64 [LENGTH]."""
    return torch.cat([torch.arange(n) for n in (*lengths, LENGTH - sum(lengths))])


def losses_of(made) -> list[tuple[float, float]]:
    """The loss and the gradient norm of each step."""
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it starts the ranks
    trainer, seen = made.build(), []
    trainer.metrics_processor.log = lambda step, loss, highest, norm, **others: seen.append((loss, norm))
    fill(trainer.model_parts[0])
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other sum
    data = trainer.batch_generator(trainer.dataloader)
    while trainer.should_continue_training():
        trainer.step += 1
        trainer.train_step(data)
    trainer.close()
    return seen


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Gives the matrices weights that do not depend on the ranks; DTensors have no common draw on a CPU."""
    torch.manual_seed(3)
    for weight in model.parameters():
        if weight.dim() > 1:
            whole = torch.randn(weight.shape) / weight.shape[-1] ** 0.5
            placed = isinstance(weight, DTensor)
            weight.copy_(distribute_tensor(whole, weight.device_mesh, weight.placements) if placed else whole)


def train(
    strategy: str | None, degree: int, parallelism: dict | None = None, placed: bool = False
) -> list[tuple[float, float]]:
    """Without a strategy by torchtitan's own attention. `placed`: each batch has its own placement."""
    made = config(degree, **(parallelism or {}))
    if strategy:
        from megatron.context_parallel.integration.torchtitan import use_context_parallel

        use_context_parallel(made, strategy, partial(place, costs=Costs(1.0)) if placed else None)
    return losses_of(made)
