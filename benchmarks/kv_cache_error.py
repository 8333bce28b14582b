"""The error of logits with keys and values in 8 bits, against the same model with a cache in its dtype.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/kv_cache_error.py

8 layers of 512 (8 heads, 4 key/value heads), random weights whose scores have a standard deviation of about 2, random
tokens in chunks, then decode steps. One rank: results do not depend on the number of ranks.
"""

import tempfile

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from rich.table import Table

from benchmarks.decode_step import SETTINGS
from megatron.context_parallel import ContextParallel
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.integration.rope import use_layout
from megatron.context_parallel.integration.spec import block_spec
from megatron.context_parallel.patches.cpu_host import support_cpu_host

LAYERS, VOCABULARY, STEPS = 8, 4096, 64
LENGTHS = (128, 1024, 4096)


def model() -> GPTModel:
    """In float32, always with the same weights."""
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(num_layers=LAYERS, init_method_std=0.06, **SETTINGS)
    cp = ContextParallel("ring", group=parallel_state.get_context_parallel_group())
    built = GPTModel(config, block_spec(config, cp, LAYERS), VOCABULARY, 1, position_embedding_type="rope")
    use_layout(built, cp)
    return built.eval()


def logits(dtype: torch.dtype, kv_cache_dtype: str, length: int) -> torch.Tensor:
    """Of the last token of a prompt and of the steps after it, [1 + STEPS, vocabulary]."""
    built = model().to(dtype)
    of = Session(built, built.context_parallel, cache_tokens=length + STEPS, kv_cache_dtype=kv_cache_dtype)
    tokens = torch.randint(VOCABULARY, (length + STEPS,), generator=torch.Generator().manual_seed(length)).tolist()
    sequence = of.open()
    found = []
    for start in range(0, length, 512):
        rows = of.forward({sequence: tokens[start : min(start + 512, length)]})
    found.append(rows[sequence])
    for place in range(length, length + STEPS):
        found.append(of.forward({sequence: [tokens[place]]})[sequence])
    return torch.stack(found)


def main() -> None:
    torch.set_num_threads(1)
    support_cpu_host()
    table = Table("model", "cache", *[f"{length} tokens" for length in LENGTHS], "same most likely token")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        exact = {length: logits(torch.float32, "auto", length) for length in LENGTHS}
        for dtype in (torch.float32, torch.bfloat16):
            for kv_cache_dtype in ("auto", "int8", "fp8"):
                if (dtype, kv_cache_dtype) == (torch.float32, "auto"):
                    continue
                found = {length: logits(dtype, kv_cache_dtype, length) for length in LENGTHS}
                errors = [f"{(found[n] - exact[n]).norm() / exact[n].norm():.1e}" for n in LENGTHS]
                same = torch.cat([found[n].argmax(-1) == exact[n].argmax(-1) for n in LENGTHS]).float().mean()
                table.add_row(str(dtype).removeprefix("torch."), kv_cache_dtype, *errors, f"{same:.1%}")
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    table.title = "relative error of logits against the float32 model with its own cache"
    show(table)


if __name__ == "__main__":
    main()
