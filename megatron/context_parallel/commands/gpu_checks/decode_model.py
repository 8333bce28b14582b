"""Decode steps of a model: against one forward pass without a cache, and their time with and without CUDA graphs."""

import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron.context_parallel import ContextParallel

from .common import CheckReport, CheckSizes, has_megatron, model_parallel, row_of, world_of_one

TABLE = "decode steps of a model"
TIMES = "time of decode steps"
PROMPTS = (1, 63, 64, 130)  # tokens of each row; pages have 64
STEPS = 24
VOCABULARY = 4096
CASES: list[tuple[torch.dtype, str, float]] = [  # the dtype of a model and of its cache, and the relative error
    (torch.bfloat16, "auto", 5e-2),
    (torch.float32, "auto", 1e-4),
    (torch.bfloat16, "int8", 2e-1),
]


def check_decode_model(report: CheckReport, sizes: CheckSizes, device: torch.device) -> None:
    """Errors of the logits of four rows, of which two end early, then times of steps; or why it was skipped."""
    if not has_megatron(report, TABLE):
        return
    with world_of_one(device), model_parallel():
        for dtype, cache, bound in CASES:
            case = {"dtype": str(dtype).removeprefix("torch."), "cache": cache, "rows": len(PROMPTS)}
            with row_of(report, TABLE, **case) as row:
                with _warnings() as lines:
                    error = _compare(*_model(sizes, 4, dtype, device), cache, device)
                verdict = "PASS" if error <= bound and not lines else "FAIL"
                row |= {"error": error, "bound": bound, "verdict": verdict, "wrong": "; ".join(lines)}
        model, cp = _model(sizes, sizes.decode_layers, torch.bfloat16, device)
        for rows in sizes.decode_sequences:
            case = {"layers": sizes.decode_layers, "tokens before": sizes.decode_prompt, "sequences": rows}
            with row_of(report, TIMES, **case) as row, _warnings() as lines:
                for how in ("eager", "graphs"):
                    if how == "graphs" and device.type != "cuda":
                        continue
                    seconds = _seconds(model, cp, rows, sizes.decode_prompt, how == "graphs", device)
                    row |= {f"{how}, ms": 1000 * seconds, f"{how}, tokens/s": rows / seconds}
                row |= {"verdict": "FAIL" if lines else "PASS", "wrong": "; ".join(lines)}


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


def _model(
    sizes: CheckSizes, layers: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.nn.Module, ContextParallel]:
    """A Llama with random weights, and the context parallelism of its layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron.context_parallel.integration.rope import use_layout
    from megatron.context_parallel.integration.spec import block_spec

    (heads, kv_heads), dim = sizes.overhead_heads, sizes.speed_head_dims[-1]
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=layers, hidden_size=heads * dim, ffn_hidden_size=2 * heads * dim, num_attention_heads=heads,
        num_query_groups=kv_heads, kv_channels=dim, attention_dropout=0.0, hidden_dropout=0.0,
        normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, bias_dropout_fusion=False, transformer_impl="local", params_dtype=dtype,
        bf16=dtype is torch.bfloat16, init_method_std=2 * (heads * dim) ** -0.5,
    )  # fmt: skip
    cp = ContextParallel("ring", layout="contiguous")
    longest = max(PROMPTS) + STEPS
    built = GPTModel(config, block_spec(config, cp, layers), VOCABULARY, longest, position_embedding_type="rope")
    use_layout(built, cp)
    return built.to(device, dtype).eval(), cp


@torch.no_grad()
def _compare(model: torch.nn.Module, cp: ContextParallel, cache: str, device: torch.device) -> float:
    """The relative error of the logits of all steps."""
    torch.manual_seed(2)
    texts = [torch.randint(VOCABULARY, (length + STEPS,)) for length in PROMPTS]
    found = _steps(model, cp, texts, cache)
    expected = []
    for text, length, of_row in zip(texts, PROMPTS, found, strict=True):
        places = torch.arange(len(text), device=device).unsqueeze(0)
        logits = model(text.unsqueeze(0).to(device), places, None)[0]
        expected.append(logits[length - 1 :][: len(of_row)])
    whole = torch.cat(expected).double()
    got = torch.cat([torch.stack(of_row) for of_row in found]).double()
    return float((got - whole).norm() / whole.norm())


def _steps(model: torch.nn.Module, cp: ContextParallel, texts: list[Tensor], cache: str) -> list[list[Tensor]]:
    """The logits of each row in each of its steps. The first one takes the prompts."""
    from megatron.context_parallel.inference.session import Session

    session = Session(model, cp, cache_tokens=4096, kv_cache_dtype=cache)
    rows = [session.open() for _ in texts]
    found: list[list[Tensor]] = [[] for _ in texts]
    for step in range(STEPS):
        if step == STEPS // 2:
            session.free(rows.pop())
            session.free(rows.pop())
        new = {}
        for row, text, length in zip(rows, texts, PROMPTS, strict=False):
            new[row] = text[length + step - 1 if step else 0 : length + step].tolist()
        logits = session.forward(new)
        for row, of_row in zip(rows, found, strict=False):
            of_row.append(logits[row].clone())
    return found


def _seconds(
    model: torch.nn.Module, cp: ContextParallel, rows: int, prompt: int, graphs: bool, device: torch.device
) -> float:
    """The median time of a step of so many rows, each behind a prompt, until the host has its tokens."""
    from megatron.context_parallel.inference.session import Session

    session = Session(model, cp, cache_tokens=rows * (prompt + 2 * STEPS + 64), frozen=True)
    if not graphs:
        session.graphs = None
    new = {session.open(): [1] * prompt for _ in range(rows)}
    times = []
    for _ in range(STEPS + 1):  # the first pass takes the prompts, the next one compiles and captures
        begun = time.perf_counter()
        logits = session.forward(new)
        tokens = torch.stack([logits[row] for row in new]).argmax(-1).tolist()
        times.append(time.perf_counter() - begun)
        new = {row: [token] for row, token in zip(new, tokens, strict=True)}
    return statistics.median(times[2:])
