"""Decode steps of a model over a cache against one forward pass without a cache, and the time of a step."""

import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

from megatron.context_parallel import ContextParallel

from .common import CheckReport, CheckSizes, model_parallel, world_of_one

TABLE = "decode steps of a model"
PROMPTS = (1, 63, 64, 130)  # tokens of each row; pages have 64
STEPS = 24
VOCABULARY = 4096
CASES: list[tuple[torch.dtype, str, float]] = [  # the dtype of a model and of its cache, and the relative error
    (torch.bfloat16, "auto", 5e-2),
    (torch.float32, "auto", 1e-4),
    (torch.bfloat16, "int8", 2e-1),
]


def check_decode_model(report: CheckReport, sizes: CheckSizes, device: torch.device) -> None:
    """Errors of the logits of four rows, of which two end early, and milliseconds of a step; or why it was skipped."""
    if not find_spec("megatron.core"):
        report.add(TABLE, left_out="needs megatron-core (pip install megatron-core)")
        return
    with world_of_one(device), model_parallel():
        for dtype, cache, bound in CASES:
            with _warnings() as lines:
                error, seconds = _compare(*_model(sizes, dtype, device), cache, device)
            row = {"dtype": str(dtype).removeprefix("torch."), "cache": cache, "rows": len(PROMPTS)}
            verdict = "PASS" if error <= bound and not lines else "FAIL"
            wrong = "; ".join(lines)
            report.add(TABLE, **row, error=error, bound=bound, verdict=verdict, ms=1000 * seconds, wrong=wrong)


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yields the warnings of inference that come meanwhile, such as that steps run without a CUDA graph."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron.context_parallel.inference")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def _model(sizes: CheckSizes, dtype: torch.dtype, device: torch.device) -> tuple[torch.nn.Module, ContextParallel]:
    """A Llama with random weights, and the context parallelism of its layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron.context_parallel.integration.rope import use_layout
    from megatron.context_parallel.integration.spec import block_spec

    (heads, kv_heads), dim = sizes.overhead_heads, sizes.speed_head_dims[-1]
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=4, hidden_size=heads * dim, ffn_hidden_size=2 * heads * dim, num_attention_heads=heads,
        num_query_groups=kv_heads, kv_channels=dim, attention_dropout=0.0, hidden_dropout=0.0,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, bias_dropout_fusion=False, transformer_impl="local", params_dtype=dtype,
        bf16=dtype is torch.bfloat16, init_method_std=2 * (heads * dim) ** -0.5,
    )  # fmt: skip
    cp = ContextParallel("ring", layout="contiguous")
    longest = max(PROMPTS) + STEPS
    built = GPTModel(config, block_spec(config, cp, 4), VOCABULARY, longest, position_embedding_type="rope")
    use_layout(built, cp)
    return built.to(device, dtype).eval(), cp


@torch.no_grad()
def _compare(model: torch.nn.Module, cp: ContextParallel, cache: str, device: torch.device) -> tuple[float, float]:
    """The relative error of the logits of all steps, and the seconds of a step."""
    torch.manual_seed(2)
    texts = [torch.randint(VOCABULARY, (length + STEPS,)) for length in PROMPTS]
    found, seconds = _steps(model, cp, texts, cache, device)
    expected = []
    for text, length, of_row in zip(texts, PROMPTS, found, strict=True):
        places = torch.arange(len(text), device=device).unsqueeze(0)
        logits = model(text.unsqueeze(0).to(device), places, None)[0]
        expected.append(logits[length - 1 :][: len(of_row)])
    whole = torch.cat(expected).double()
    got = torch.cat([torch.stack(of_row) for of_row in found]).double()
    return float((got - whole).norm() / whole.norm()), seconds


def _steps(
    model: torch.nn.Module, cp: ContextParallel, texts: list[Tensor], cache: str, device: torch.device
) -> tuple[list[list[Tensor]], float]:
    """The logits of each row in each of its steps, and the median time of a step. The first one takes the prompts."""
    from megatron.context_parallel.inference.session import Session

    session = Session(model, cp, cache_tokens=4096, kv_cache_dtype=cache)
    rows = [session.open() for _ in texts]
    found: list[list[Tensor]] = [[] for _ in texts]
    times = []
    for step in range(STEPS):
        if step == STEPS // 2:
            session.free(rows.pop())
            session.free(rows.pop())
        new = {}
        for row, text, length in zip(rows, texts, PROMPTS, strict=False):
            new[row] = text[length + step - 1 if step else 0 : length + step].tolist()
        begun = time.perf_counter()
        logits = session.forward(new)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begun)
        for row, of_row in zip(rows, found, strict=False):
            of_row.append(logits[row].clone())
    return found, statistics.median(times[1:])
