"""The prompt tokens of a step: chosen by predicted time, alike on all ranks, and used by the engine."""

from dataclasses import replace

import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams

from benchmarks.prefill_chunks import MODEL, RANKS, TOKENS, links, prefill
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.inference.choose import Rates
from megatron.context_parallel.inference.engine import Engine, Request
from megatron.context_parallel.inference.prefill_chunks import (
    LONGEST,
    ROWS,
    WAIT,
    PassTime,
    PrefillChunks,
    chunk_tokens,
)
from megatron.context_parallel.inference.tokenizer import ByteTokenizer
from megatron.context_parallel.trainer.arguments.preset_model import preset_model

NVLINK, ETHERNET = links().values()


@pytest.fixture(scope="module")
def llama():
    return preset_model(MODEL, TOKENS)


def test_bytes_of_a_million_tokens(llama):
    """pass-KV sends 7/8 of all keys so far, pass-Q of the new queries and partial outputs, whatever the chunk."""
    time = PassTime(llama, NVLINK, RANKS)
    whole = prefill(time, lambda cached: TOKENS)
    assert whole.sent == 7 / 8 * TOKENS * 2 * 8 * 128 * 2 and len(whole.steps) == 1
    keys = prefill(replace(time, rule="pass-kv"), lambda cached: 8000)
    assert keys.sent == pytest.approx(whole.sent * 126 / 2) and len(keys.steps) == 125
    queries = 7 / 8 * TOKENS * 32 * (128 * 2 + 129 * 4)
    for tokens in (8000, 125_000):
        assert prefill(replace(time, rule="pass-q"), lambda cached, t=tokens: t).sent == pytest.approx(queries)


def test_few_rows_take_as_long_as_a_tile_and_as_reading_keys(llama):
    time = PassTime(llama, NVLINK, RANKS)
    device = replace(NVLINK.device, block_us=3.0)
    rates = Rates(1.0, 1.0, device=device)
    few, tile = (rates.block(rows, 4096, rows * 4096, time.sizes) for rows in (1, 128))
    assert few == pytest.approx(tile) and rates.block(256, 4096, 256 * 4096, time.sizes) > 1.5 * tile
    slow = replace(rates, device=replace(device, memory_GB_s=1.0))
    assert slow.block(1, 4096, 4096, time.sizes) == pytest.approx(3e-6 + 4096 * 4096 / 1e9)
    assert time(512, 0) > 32 * 0.8e-4  # weights are read: 436 MB a layer at 3,350 GB/s
    assert time(512, 0) / 512 > 4 * time(8192, 0) / 8192


def test_links_ranks_and_texts_decide(llama):
    near, far = (PassTime(llama, cluster, RANKS) for cluster in (NVLINK, ETHERNET))
    assert chunk_tokens(near, 0, TOKENS, False) < chunk_tokens(far, 0, TOKENS, False)
    assert chunk_tokens(PassTime(llama, NVLINK, 1), 0, TOKENS, False) < chunk_tokens(near, 0, TOKENS, False)
    for time in (near, far):
        smallest = RANKS * ROWS
        for cached in (0, 50_000, 700_000):
            most, beside = (chunk_tokens(time, cached, TOKENS, decoding) for decoding in (False, True))
            assert smallest <= beside <= most and time(most, cached) <= LONGEST
            assert time(beside, cached) <= max(WAIT, 2 * time(smallest, cached))
    # A prompt that is chosen chunk by chunk takes at most a tenth longer than in the best of equal chunks on NVLink.
    chosen = PrefillChunks.predicted(near, TOKENS)
    equal = min(sum(prefill(near, lambda cached, t=t: t).steps) for t in (8192, 65_536, TOKENS))
    assert sum(prefill(near, lambda cached: chosen(cached, False)).steps) < 1.1 * equal
    # With the tensor-parallel ranks of a node between them, context ranks are on two nodes.
    assert PassTime(llama, load_cluster("dgx-h100"), 2, tensor=8).rates.bandwidth == 50e9
    # Twice as much memory holds twice the rows; a cache takes some of it.
    big = replace(NVLINK, device=replace(NVLINK.device, memory_GiB=160))
    assert PassTime(llama, big, RANKS).most_rows(0) > 2 * near.most_rows(0) > 2 * near.most_rows(TOKENS) > 0


def test_windows_shorten_steps(llama):
    whole = PassTime(llama, NVLINK, RANKS)
    window, some = (replace(whole, model=replace(llama, window_size=1024, full_layers=n)) for n in (0, 16))
    assert window(8192, 10**6) == pytest.approx(window(8192, 1024)) and window(8192, 10**6) < whole(8192, 2048)
    assert some(8192, 10**6) == pytest.approx((window(8192, 10**6) + whole(8192, 10**6)) / 2)


class Counted:
    """A cache that counts the tokens of each step."""

    vocabulary, window = 256, None
    scored: dict = {}

    def __init__(self) -> None:
        self.steps: list[dict[int, int]] = []
        self.opened = 0

    def open(self) -> int:
        self.opened += 1
        return self.opened

    def room(self) -> int:
        return 10_000

    def can_copy(self) -> bool:
        return True

    def free(self, sequence: int) -> None: ...

    def forward(self, new, prefill=None, scored=()) -> dict:
        self.steps.append({s: len(tokens) for s, tokens in new.items()})
        return {s: torch.zeros(256) for s in new}

    def share(self, values, width=1, of=None) -> dict:
        return values


def test_the_engine_takes_the_choice_for_cached_tokens_and_running_texts():
    cache = Counted()
    table = [(100, 10)] + [(100 + digits, 10 + digits) for digits in range(1, 9)]
    engine = Engine(cache, ByteTokenizer(255), PrefillChunks(table))
    greedy = SamplingParams(num_tokens_to_generate=3, top_k=1)
    engine.add(Request("alone", [7] * 250, greedy))
    for _ in range(4):
        engine.step()
    assert cache.steps == [{1: 100}, {1: 107}, {1: 43}, {1: 1}]
    engine.add(Request("beside", [8] * 100, greedy, key="other"))
    engine.step()
    engine.step()
    assert cache.steps[4:] == [{1: 1, 2: 10}, {2: 90}]


def other_tables(rank_of) -> list:
    import torch.distributed as dist

    return PrefillChunks([(dist.get_rank(), 5)] * (1 + dist.get_rank())).agreed().table


def test_all_ranks_take_the_choice_of_the_first(ranks):
    assert ranks(2, other_tables, None) == [[(0, 5)]] * 2
