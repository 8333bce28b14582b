"""Compares tokens per second of one rank with transformers' `generate` with a static cache, on one Llama, interleaved.

Part of inference.py: `python benchmarks/inference.py --decode-speed`.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.sampling_params import SamplingParams
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from megatron.context_parallel import ContextParallel
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.generation.flags import Source
from megatron.context_parallel.generation.load_model import load_model
from megatron.context_parallel.generation.model_source import model_arguments
from megatron.context_parallel.inference.engine import Engine, Request
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.inference.tokenizer import ByteTokenizer
from megatron.context_parallel.patches.cpu_host import support_cpu_host
from megatron.context_parallel.trainer.setup import initialize_model_parallel

PROMPT, NEW, TOGETHER = 64, 128, 4
BARS = {"one request / transformers": 1.0, f"{TOGETHER} requests / one": 2.5}


class Endless(ByteTokenizer):
    """A byte tokenizer without an end token."""

    def __init__(self) -> None:
        self.ends = frozenset()


def models(folder: str, hidden: int, layers: int) -> tuple[LlamaForCausalLM, Engine]:
    """A Llama of random weights in transformers, and an engine over it on one rank."""
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 259, "max_position_embeddings": 1024}
    torch.manual_seed(1)
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    theirs.save_pretrained(folder)
    theirs.generation_config.eos_token_id = None
    support_cpu_host()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    args = model_arguments(Source(load=folder))
    initialize_model_parallel(args)
    cp = ContextParallel(args.cp_layers[0], group=parallel_state.get_context_parallel_group())
    return theirs, Engine(Session(load_model(args, cp), cp, cache_tokens=4096), Endless())


def prompt(seed: int) -> list[int]:
    return torch.randint(3, 256, (PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()


def generated(engine: Engine, count: int, names: list[str]) -> list[int]:
    """The tokens of the first of some requests that start together. The cache has none of their tokens."""
    texts: dict[str, list[int]] = {}
    for i in range(count):
        names.append(str(len(names)))
        params = SamplingParams(num_tokens_to_generate=NEW, top_k=1)
        engine.add(Request(names[-1], prompt(i), params, key=names[-1]))
        texts[names[-1]] = []
    while not engine.idle:
        for output in engine.step():
            texts[output.request] += [token.id for token in output.tokens]
    return next(iter(texts.values()))


def speed(action: Callable[[], list[int]], tokens: int, found: list[list[int]]) -> float:
    """Tokens per second."""
    begun = time.perf_counter()
    found.append(action())
    return tokens / (time.perf_counter() - begun)


def run(hidden: int, layers: int, rounds: int) -> int:
    """Measure in turn, and print medians and ratios with their targets. Returns 1 if the texts differ."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        theirs, engine = models(folder, hidden, layers)
        names, texts = list[str](), list[list[int]]()
        ids = torch.tensor([prompt(0)])
        how = {"do_sample": False, "max_new_tokens": NEW, "cache_implementation": "static", "pad_token_id": 0}
        cases = {
            "transformers": (lambda: theirs.generate(ids, **how)[0, PROMPT:].tolist(), NEW),
            "one request": (lambda: generated(engine, 1, names), NEW),
            f"{TOGETHER} requests": (lambda: generated(engine, TOGETHER, names), TOGETHER * NEW),
        }
        speeds: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(rounds + 1):
            for name, (action, tokens) in cases.items():
                measured = speed(action, tokens, texts)
                if number:  # the first is to warm up
                    speeds[name].append(measured)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    table = Table("", "tokens/s", title=f"{layers} layers of {hidden}, 1 thread: {PROMPT} tokens, then {NEW} new ones")
    for name, measured in speeds.items():
        table.add_row(name, f"{statistics.median(measured):.0f}")
    show(table)
    for name, bar in BARS.items():
        over, under = name.split(" / ")
        under = "one request" if under == "one" else under
        ratios = [a / b for a, b in zip(speeds[over], speeds[under], strict=True)]
        print(f"{name}: {statistics.median(ratios):.2f} (bar: {bar})")
    same = all(text == texts[0] for text in texts)
    print(f"texts are {'the same' if same else 'different'}")
    return int(not same)
