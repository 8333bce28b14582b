"""Ranks of one process that hand sequences over: caches with known rows, and their ports."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy
import torch

from megatron.context_parallel.inference.cache import KVCache
from megatron.context_parallel.inference.handoff.leases import Leases
from megatron.context_parallel.inference.handoff.rows_port import RowsFormat, RowsPort
from megatron.context_parallel.inference.handoff.sequences import HandedSequences
from megatron.context_parallel.inference.pages import PageTables
from megatron.context_parallel.integration.vllm.pull import Pull
from megatron.context_parallel.integration.vllm.wire import Place, Ticket
from megatron.context_parallel.serving.listen import bind

LAYERS, HEADS, DIM = 3, 4, 8
MODEL = {"num_hidden_layers": LAYERS, "head_dim": DIM, "dtype": "float32", "num_key_value_heads": HEADS}
Dense = list[tuple[torch.Tensor, torch.Tensor]]  # keys and values [tokens, heads, d] of each layer


def dense(tokens: int, seed: int) -> Dense:
    draw = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(tokens, HEADS, DIM, generator=draw) for _ in range(2)) for _ in range(LAYERS)]  # type: ignore[misc]


@dataclass
class Ranks:
    """The caches of all ranks; ranks of tensor parallelism share a part of the rows.

    Attributes:
        tables: the page tables of the context ranks.
        caches, handed, ports: by context rank, then by tensor rank.
        released: the leases that ended, and whether by time.
    """

    tables: PageTables
    caches: list[KVCache]
    handed: list[HandedSequences]
    places: tuple[Place, ...]
    reports: list
    released: list
    leases: Leases

    def prefill(self, sequence: int, rows: Dense, begin: int, end: int) -> None:
        """Store the rows of some positions, as a pass does; the sequence grows by them."""
        self.tables.add({sequence: end - begin})
        for i, place in enumerate(self.places):
            heads = slice(place.first_head, place.first_head + place.heads)
            positions = self.tables.positions(sequence, place.part, begin)
            slots = torch.from_numpy(self.tables.slots(sequence, place.part, begin))
            for layer, (keys, values) in enumerate(rows):
                self.caches[i].append(layer, slots, keys[positions][:, heads], values[positions][:, heads])

    def hand_over(self, name: str, rows: Dense) -> int:
        """Prefill all rows of a new sequence, which decoders may fetch under this name. Returns the sequence."""
        sequence, tokens = self.tables.open(), len(rows[0][0])
        self.prefill(sequence, rows, 0, tokens)
        self.each("open", name, tokens)
        self.each("finish_rows", name, sequence, tokens)
        return sequence

    def ticket(self, name: str, tokens: int) -> Ticket:
        return Ticket(name, tokens, "", MODEL, self.places)

    def each(self, call: str, *given) -> None:
        for handed in self.handed:
            getattr(handed, call)(*given)


@contextlib.contextmanager
def handing_ranks(n: int, tensor: int = 1, seconds: float = 30.0, pages: int = 64) -> Iterator[Ranks]:
    """n context ranks of `tensor` tensor ranks each."""
    tables = PageTables(n, pages, 4)
    heads = HEADS // tensor
    released: list = []
    reports: list = []
    leases = Leases(seconds, lambda name, late: released.append((name, late)))
    found = Ranks(tables, [], [], (), reports, released, leases)
    with contextlib.ExitStack() as stack:
        for i in range(n * tensor):
            part, first = i // tensor, i % tensor * heads
            cache = KVCache(pages, 4, [(heads, DIM, DIM)] * LAYERS, torch.float32, torch.device("cpu"))
            listener = bind("127.0.0.1", 0)
            place = Place("127.0.0.1", listener.getsockname()[1], part, first, heads)
            handed = HandedSequences(tables, cache, part)
            rows = RowsFormat(LAYERS, first, heads, DIM, DIM, "float32")
            port = RowsPort(handed, rows, listener, None if i else leases, reports.append)
            stack.enter_context(port.running())
            found.caches.append(cache)
            found.handed.append(handed)
            found.places += (place,)
        yield found


class Fetched:
    """What a decoder's worker writes, in dense tensors that are NaN where nothing came."""

    def __init__(self, tokens: int, heads: int = HEADS) -> None:
        self.rows: Dense = [
            (torch.full((tokens, heads, DIM), torch.nan), torch.full((tokens, heads, DIM), torch.nan))
            for _ in range(LAYERS)
        ]
        self.written = numpy.zeros(tokens, dtype=int)

    def __call__(self, layer: int, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.rows[layer][0][positions] = keys
        self.rows[layer][1][positions] = values
        self.written[positions] += layer == 0


class Calls:
    """Stands for `HandedSequences` and records the calls."""

    def __init__(self) -> None:
        self.seen = list[tuple]()

    def open(self, name: str, tokens: int) -> None:
        self.seen.append(("open", name, tokens))

    def finish_rows(self, name: str, sequence: int, end: int) -> None:
        self.seen.append(("finish", name, end))

    def close(self, name: str, why: str) -> None:
        self.seen.append(("close", name, why))


def fetch(
    ticket: Ticket, first: int = 0, heads=(0, HEADS), worker=(0, 1), silence: float = 5.0
) -> tuple[Pull, Fetched]:
    fetched = Fetched(ticket.tokens, heads[1] - heads[0])
    pull = Pull(ticket, first, heads, fetched, worker, silence)
    pull.run()
    return pull, fetched
