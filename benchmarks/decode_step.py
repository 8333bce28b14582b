"""What a decode step costs on the host: per layer on 1 and 2 ranks, over long caches, and in scheduling.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/decode_step.py

Times are CPU times of the thread that runs the step, so other programs disturb them little. Waiting is not counted.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing
from megatron.core import parallel_state
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from rich.table import Table

from megatron.context_parallel import ContextParallel
from megatron.context_parallel.cli.tables import show
from megatron.context_parallel.inference.decode_rows import DecodeRows
from megatron.context_parallel.inference.engine import Engine, Request
from megatron.context_parallel.inference.pages import PAGE, PageTables
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.inference.tokenizer import ByteTokenizer
from megatron.context_parallel.integration.rope import use_layout
from megatron.context_parallel.integration.spec import block_spec
from megatron.context_parallel.patches.cpu_host import support_cpu_host

VOCABULARY = 256
LAYERS = 16
LONG = 8192  # tokens of a cached sequence
MILLION = 1_000_000
SETTINGS = {
    "hidden_size": 512,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "normalization": "RMSNorm",
    "bias_dropout_fusion": False,
    "transformer_impl": "local",
    "add_bias_linear": False,
}


def session(layers: int, cache_tokens: int) -> Session:
    """A session over random weights, with random keys and values in its cache."""
    n = dist.get_world_size()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = TransformerConfig(num_layers=layers, context_parallel_size=n, **SETTINGS)
    cp = ContextParallel("ring", group=parallel_state.get_context_parallel_group())
    model = GPTModel(config, block_spec(config, cp, layers), VOCABULARY, 1, position_embedding_type="rope")
    use_layout(model, cp)
    built = Session(model.eval(), cp, cache_tokens=cache_tokens, frozen=True)
    for pages in (x for layer in built.cache.layers for x in layer):
        pages.normal_()
    return built


def microseconds(step: Callable[[], object], rounds: int, warm_up: int = 12) -> float:
    """The median CPU time of this thread in a step; with several ranks, of the rank that takes longest in each."""
    found = []
    for number in range(warm_up + rounds):
        begun = time.thread_time_ns()
        step()
        if number >= warm_up:
            found.append((time.thread_time_ns() - begun) / 1000)
    longest = torch.tensor(found)
    if dist.is_initialized():
        dist.all_reduce(longest, dist.ReduceOp.MAX)
    return statistics.median(longest.tolist())


def python_calls(step: Callable[[], object]) -> int:
    """The number of calls of Python functions in a step."""
    count = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(on_event)
    step()
    sys.setprofile(None)
    return count


def decode(of: Session, sequences: list[int]) -> None:
    """A step with greedy tokens, as the engine makes it."""
    logits = of.forward({s: [7] for s in sequences})
    of.share({s: [int(row.argmax())] for s, row in logits.items()})


def of_rank(rank: int, n: int, folder: str, found: list) -> None:
    """Measures on one of n ranks; the first puts what it found into `found`."""
    torch.set_num_threads(1)
    support_cpu_host()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n)
    parallel_state.initialize_model_parallel(context_parallel_size=n)
    with torch.no_grad():
        measured = {"layer": per_layer(n), "products": products(), "long": long_caches() if n == 1 else {}}
    if rank == 0:
        found.append(measured)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def per_layer(n: int) -> dict[int, tuple[float, float]]:
    """By sequences of a step: microseconds and Python calls per layer."""
    of, measured = session(LAYERS, 128 * 64 * n), {}
    for count in (1, 4, 16):
        sequences = [of.open() for _ in range(count)]
        of.forward({s: [*range(200)] for s in sequences})

        def step(sequences: list[int] = sequences) -> None:
            decode(of, sequences)

        taken = microseconds(step, 60) / LAYERS
        measured[count] = taken, python_calls(step) / LAYERS
        for s in sequences:
            of.free(s)
    return measured


def products() -> float:
    """Microseconds per layer of the products with the weights alone, for one row."""
    shapes = [(1024, 512), (512, 512), (1024, 512), (512, 1024)] * LAYERS
    weights = [torch.randn(shape) for shape in shapes]
    rows = {columns: torch.randn(1, columns) for columns in (512, 1024)}
    return microseconds(lambda: [torch.mm(rows[w.shape[1]], w.t()) for w in weights], 60) / LAYERS


def long_caches() -> dict[str, float]:
    """Microseconds of a step over 8,192 cached tokens a sequence."""
    of, measured = session(2, 6 * (LONG + 1024)), {}
    page = of.tables.page

    def measure(name: str, rows: int) -> None:
        """Four sequences that grow by so many rows at a time: steps of all, and of one after the other."""
        four = [of.open() for _ in range(4)]
        for _ in range(LONG // rows):
            for s in four:
                of.tables.add({s: rows})
        measured[name] = microseconds(lambda: decode(of, four), 16, 4)
        measured[f"{name}, in turn"] = microseconds(lambda: [decode(of, [s]) for s in four], 16, 4)
        for s in four:
            of.free(s)

    measure("whole", LONG)
    measure("page by page", page)
    holes = [of.open() for _ in range(of.room() // page)]
    for s in holes:
        of.tables.add({s: page})
    for s in sorted(holes, key=lambda s: of.tables.slots(s, 0)[0])[::2]:
        of.free(s)
    scattered = of.open()
    of.tables.add({scattered: LONG})
    measured["every other page"] = microseconds(lambda: decode(of, [scattered]), 16, 4)
    return measured


class Full:
    """A cache in which one sequence decodes and nothing else fits."""

    vocabulary, window = VOCABULARY, None
    space = 2 * MILLION

    def open(self) -> int:
        return 1

    def room(self) -> int:
        return self.space

    def can_copy(self) -> bool:
        return True

    def forward(self, new: dict, prefill=None, scored=()) -> dict:
        return {1: torch.zeros(VOCABULARY)}

    def share(self, values: dict, width: int = 1) -> dict:
        return values


def waiting() -> float:
    """Milliseconds of a step in which a prompt of a million tokens waits for space in the cache."""
    cache = Full()
    engine = Engine(cache, ByteTokenizer(VOCABULARY - 1))
    engine.add(Request("short", [1, 2, 3], SamplingParams(num_tokens_to_generate=1000, top_k=1)))
    engine.step()
    cache.space = 10
    engine.add(Request("long", [7] * MILLION, SamplingParams(num_tokens_to_generate=10, top_k=1)))
    return microseconds(engine.step, 5, 2) / 1000


def tables(fragmented: bool) -> float:
    """Milliseconds of the page tables in a step, with a million tokens on 8 ranks."""
    of = PageTables(8, 5000)
    if fragmented:
        others = [of.open() for _ in range(5000)]
        for s in others:
            of.add({s: 8 * PAGE})
        random.Random(1).shuffle(others)
        for s in others[::2]:
            of.free(s)
    long = of.open()
    of.add({long: MILLION})
    return microseconds(lambda: DecodeRows(of, {long: [1]}, of.add({long: 1}), 0).keys(-1), 40) / 1000


def ranks(n: int) -> dict:
    found = torch.multiprocessing.get_context("spawn").Manager().list()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(of_rank, (n, folder, found), n)
    return SimpleNamespace(**found[0])


def main() -> None:
    one, two = ranks(1), ranks(2)
    table = Table("ranks", "sequences", "µs a layer", "Python calls a layer", title=f"{LAYERS} layers of 512, a step")
    for n, measured in ((1, one), (2, two)):
        for count, (taken, calls) in measured.layer.items():
            table.add_row(str(n), str(count), f"{taken:.0f}", f"{calls:.0f}")
        table.add_row(str(n), "1: products with weights alone", f"{measured.products:.0f}", "")
    show(table)
    whole, turns = one.long["whole"], one.long["whole, in turn"]
    for name, taken in one.long.items():
        print(f"2 layers over {LONG} tokens a sequence: {name}: {taken:.0f} µs")
    print(f"four together / one after the other: {whole / turns:.2f} (bar: 1.2)")
    print(f"grown page by page / whole: {one.long['page by page'] / whole:.2f} (bar: 1.2)")
    print(f"one in every other page / one of four: {4 * one.long['every other page'] / turns:.2f} (bar: 1.2)")
    print(f"page tables of a million tokens on 8 ranks: {tables(False):.3f} ms, in random pages {tables(True):.3f} ms")
    print(f"a step in which a million tokens wait: {waiting():.2f} ms (bar: 1)")


if __name__ == "__main__":
    main()
