"""Rows of handed sequences: all of them, once, right, and never those of another sequence."""

import socket
import struct
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core.inference.sampling_params import SamplingParams
from transformers import Qwen3MoeConfig

from megatron.context_parallel.inference.engine import Engine, Request, RequestOutput
from megatron.context_parallel.inference.faults import NAN
from megatron.context_parallel.inference.handoff import rows_port
from megatron.context_parallel.inference.handoff.leases import Leases
from megatron.context_parallel.inference.handoff.sequences import HandedSequences
from megatron.context_parallel.inference.tokenizer import ByteTokenizer
from megatron.context_parallel.integration.vllm import wire
from megatron.context_parallel.integration.vllm.identity import difference, identity
from megatron.context_parallel.integration.vllm.pull import Pull, give_back
from megatron.context_parallel.integration.vllm.wire import Kind, Place, Ticket, WireError
from megatron.context_parallel.serving.listen import bind
from tests.support.handoff_case import DIM, HEADS, LAYERS, MODEL, Calls, Fetched, dense, fetch, handing_ranks
from tests.support.plain_session import PlainSession
from tests.support.server_case import Parrot, wait_until
from tests.support.session_case import session, start


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(rows_port, "_OPEN_SECONDS", 0.5)


ROW = LAYERS * 2 * HEADS * DIM * 4  # bytes


def same(fetched: Fetched, rows, first: int = 0, heads=slice(None)) -> bool:
    return all(
        torch.equal(fetched.rows[layer][i][first:], rows[layer][i][first:, heads])
        for layer in range(LAYERS)
        for i in range(2)
    )


@pytest.mark.parametrize("n,tensor", [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_every_row_comes_once(n, tensor):
    """In chunks of any length; from any position on; all heads, and half of them."""
    rows = dense(300, 1)
    with handing_ranks(n, tensor, pages=128) as of:
        other, sequence = of.tables.open(), of.tables.open()
        of.prefill(other, dense(9, 2), 0, 9)
        of.each("open", "a", 300)
        for begin, end in [(0, 1), (1, 150), (150, 300)]:
            of.prefill(sequence, rows, begin, end)
            of.each("finish_rows", "a", sequence, end)
        for first in (0, 1, 128, 299):
            for worker, heads in enumerate([(0, HEADS), (0, 2), (2, HEADS)]):
                pull, fetched = fetch(of.ticket("a", 300), first, heads, (worker, 99))
                count = 300 - first
                assert pull.report.error == "" and pull.first_missing() == 300
                assert same(fetched, rows, first, slice(*heads))
                assert (fetched.written == [0] * first + [1] * count).all()
                assert pull.report.rows == count and pull.report.nbytes == count * ROW * (heads[1] - heads[0]) // HEADS
        wait_until(lambda: len(of.reports) == 12)
        assert not of.released


def test_rows_come_while_the_prefill_goes_on():
    rows, came = dense(40, 3), []
    with handing_ranks(2) as of:
        sequence = of.tables.open()
        fetched = Fetched(40)
        pull = Pull(of.ticket("a", 40), 0, (0, HEADS), fetched)
        thread = threading.Thread(target=pull.run)
        of.handed[0].open("a", 40)
        thread.start()  # before the other rank knows of the sequence
        time.sleep(0.1)
        of.handed[1].open("a", 40)
        for begin, end in [(0, 16), (16, 30), (30, 40)]:
            of.prefill(sequence, rows, begin, end)
            of.each("finish_rows", "a", sequence, end)
            wait_until(lambda end=end: pull.came[:end].all())
            came.append(int(pull.came.sum()))
        thread.join(5)
        assert came == [16, 30, 40] and same(fetched, rows) and not pull.report.error
        wait_until(lambda: of.reports)
        assert (of.reports[0].rows, of.reports[0].nbytes, of.reports[0].error) == (40, 40 * ROW, "")


def test_a_lease_ends_when_all_workers_have_reported():
    with handing_ranks(1) as of:
        of.hand_over("a", dense(5, 1))
        for worker in (1, 1, 0):
            assert not of.released
            fetch(of.ticket("a", 5), worker=(worker, 2))
            wait_until(lambda: len(of.reports) > 0)
            of.reports.clear()
        wait_until(lambda: of.released == [("a", False)])


def test_a_ticket_that_is_given_back_ends_its_lease():
    """Also that of two workers. A rank that is not there, and one that no name or port can have, are no errors."""
    with handing_ranks(1) as of:
        of.hand_over("a", dense(5, 1))
        for place in (Place("127.0.0.1", 1 << 16, 0, 0, HEADS), Place("a" * 64, 1, 0, 0, HEADS)):
            give_back(replace(of.ticket("a", 5), places=(place,)), "another model")
        assert not of.released
        give_back(of.ticket("a", 5), "another model")
        wait_until(lambda: of.released == [("a", False)])
        assert [(report.rows, report.error) for report in of.reports] == [(0, "another model")]
        give_back(of.ticket("a", 5), "another model")  # its lease has ended


def test_a_lease_ends_by_time_and_a_sign_renews_it():
    with handing_ranks(1, seconds=0.6) as of:
        of.each("open", "a", 5)
        of.each("open", "b", 5)
        with socket.create_connection((of.places[0].host, of.places[0].port)) as connection:
            connection.sendall(wire.hello(id="a", worker=[0, 1]))
            for _ in range(6):
                time.sleep(0.2)
                connection.sendall(b"\n")
            assert of.released == [("b", True)]
            wait_until(lambda: of.released == [("b", True), ("a", True)])


def test_no_row_of_another_sequence():
    """A decoder that reads while the sequence is released, and its pages are filled with another one."""
    with handing_ranks(1, pages=128) as of:
        for i in range(20):
            rows = dense(256, 1)
            sequence = of.hand_over("a", rows)
            fetched = Fetched(256)
            pull = Pull(of.ticket("a", 256), 0, (0, HEADS), fetched)
            thread = threading.Thread(target=pull.run)
            thread.start()
            time.sleep(0.0005 * i)
            of.each("close", "a", "its lease has ended")
            of.tables.free(sequence)
            other = of.tables.open()
            of.prefill(other, dense(256, 2), 0, 256)
            thread.join(10)
            of.tables.free(other)
            for layer, both in enumerate(fetched.rows):
                for found, right in zip(both, rows[layer], strict=True):
                    here = ~found.isnan()
                    assert torch.equal(found[here], right[here])
            assert pull.report.error or same(fetched, rows)


def _refused(of, ticket: Ticket, why: str, **how) -> None:
    pull, fetched = fetch(ticket, **how, worker=(0, 2))  # the lease of a sequence waits for the other worker
    assert why in pull.report.error and pull.first_missing() == 0 and not fetched.written.any()


def test_what_ranks_refuse():
    with handing_ranks(2) as of:
        of.hand_over("a", dense(5, 1))
        _refused(of, of.ticket("a", 6), "its ticket says")
        half = Ticket("a", 5, "", MODEL | {"dtype": "bfloat16"}, of.places)
        _refused(of, half, "its ticket says")
        _refused(of, of.ticket("a", 5), "no rank of the ticket has head 4", heads=(2, 5))
        of.each("close", "a", "the prefill failed")
        of.leases.begin("a")
        _refused(of, of.ticket("a", 5), "no sequence of this id")
        _refused(of, of.ticket("guess", 5), "has ended")


@pytest.mark.parametrize("line", [b"{}\n", b"\xff\n", b"[1]\n", b"x" * 5000, wire.hello(id="a"), b"GET / HTTP/1.1\r\n"])
def test_strangers(line):
    """Their connection ends, and nobody else's."""
    with handing_ranks(1) as of:
        of.each("open", "a", 5)
        with socket.create_connection((of.places[0].host, of.places[0].port)) as connection:
            connection.sendall(line)
            connection.settimeout(5)
            while connection.recv(1000):
                pass
        sequence = of.tables.open()
        of.prefill(sequence, dense(5, 1), 0, 5)
        of.each("finish_rows", "a", sequence, 5)
        assert not fetch(of.ticket("a", 5))[0].report.error


def _rank_that(answers) -> Place:
    """A rank that holds leases, and answers others with these parts; then it says nothing more."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            kept.append(connection)
            if b"worker" in connection.makefile("rb").readline():
                connection.sendall(b"".join(_parts([wire.frame(Kind.WAIT)])))
            else:
                for part in answers(connection):
                    connection.sendall(part)

    threading.Thread(target=serve, daemon=True).start()
    return Place("127.0.0.1", listener.getsockname()[1], 0, 0, HEADS)


HEADER = dict(first_head=0, heads=HEADS, tokens=2, layers=LAYERS, key_dim=DIM, value_dim=DIM, dtype="float32")
FRAMES = [wire.plain_frame(Kind.HEADER, **HEADER), wire.frame(Kind.POSITIONS, b"\0\0\0\0\1\0\0\0", rows=2)]
FRAMES += [wire.frame(Kind.ROWS, bytes(2 * ROW // LAYERS), layer, 2) for layer in range(LAYERS)]
FRAMES += [wire.frame(Kind.END)]


def _parts(frames) -> list[bytes]:
    return [bytes(part) for frame in frames for part in frame]


def _closing(parts: list[bytes]):
    def answers(connection):
        yield from parts
        connection.close()

    return answers


BROKEN = {
    "right": ("", FRAMES),
    "ends too early": ("has ended the connection", FRAMES[:3]),
    "no rows": ("2 rows of 2 were not sent", [FRAMES[0], FRAMES[-1]]),
    "twice": ("sent twice", [*FRAMES[:5], *FRAMES[1:]]),
    "another layer": ("instead of layer 0", [*FRAMES[:2], FRAMES[3]]),
    "beyond the prompt": ("not those of the ticket", [FRAMES[0], wire.frame(Kind.POSITIONS, b"\5\0\0\0", rows=1)]),
    "too few bytes": ("instead of layer 0", [*FRAMES[:2], wire.frame(Kind.ROWS, bytes(8), 0, 2)]),
    "too many bytes": ("not part of the protocol", [*FRAMES[:2], wire.frame(Kind.ROWS, bytes(1 << 20), 0, 2)]),
    "says why": ("the prefill failed", [FRAMES[0], wire.plain_frame(Kind.FAULT, why="the prefill failed")]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_ranks_that_break(case):
    why, frames = BROKEN[case]
    pull, _ = fetch(Ticket("a", 2, "", MODEL, (_rank_that(_closing(_parts(frames))),)))
    assert why in pull.report.error and bool(pull.report.error) == bool(why)
    assert pull.first_missing() == (0 if why else 2)


def test_a_damaged_byte_is_found():
    parts = _parts(FRAMES)
    whole = b"".join(parts)
    for place in range(0, len(whole), 97):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        pull, _ = fetch(Ticket("a", 2, "", MODEL, (_rank_that(_closing([bytes(damaged)])),)), silence=0.3)
        assert pull.report.error and pull.first_missing() == 0, place


@pytest.mark.parametrize("sent", [0, 3])
def test_a_rank_that_hangs_is_given_up(sent):
    """It accepts, and then sends nothing, or not enough."""
    pull, _ = fetch(Ticket("a", 2, "", MODEL, (_rank_that(lambda connection: _parts(FRAMES[:sent])),)), silence=0.2)
    assert pull.report.error == "a rank sent nothing for 0.2 s" and pull.first_missing() == 0
    assert pull.report.seconds < 3


def test_a_rank_that_hangs_with_the_lease_is_given_up():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = Place("127.0.0.1", silent.getsockname()[1], 0, 0, HEADS)
        pull, _ = fetch(Ticket("a", 2, "", MODEL, (place,)), silence=0.2)
    assert pull.report.error == "a rank sent nothing for 0.2 s" and pull.first_missing() == 0


def test_a_rank_that_ends_closes_the_connections_of_decoders_and_prints_nothing(caplog):
    with handing_ranks(1) as of:
        of.each("open", "a", 5)
        pull = Pull(of.ticket("a", 5), 0, (0, HEADS), Fetched(5))
        thread = threading.Thread(target=pull.run)
        thread.start()
        wait_until(lambda: len(pull._sockets) == 2)
        time.sleep(0.1)
    thread.join(5)
    assert pull.report.error and not thread.is_alive()
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_decoder_that_dies():
    """Its connections end in the middle of a transfer, and nothing is reported. The lease ends by time."""
    rows = dense(300, 1)
    with handing_ranks(1, seconds=0.4, pages=128) as of:
        sequence = of.tables.open()
        of.prefill(sequence, rows, 0, 200)
        of.each("open", "a", 300)
        of.each("finish_rows", "a", sequence, 200)
        place = of.places[0]
        hellos = {"worker": [0, 1]}, {"first": 0, "heads": [0, HEADS]}
        connections = [socket.create_connection((place.host, place.port)) for _ in hellos]
        for connection, fields in zip(connections, hellos, strict=True):
            connection.sendall(wire.hello(id="a", **fields))
            assert connection.recv(10)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as of a dead process
            connection.close()
        assert not of.released
        wait_until(lambda: of.released == [("a", True)])
        assert not of.reports
        of.hand_over("b", rows)
        pull, fetched = fetch(of.ticket("b", 300))
        assert not pull.report.error and same(fetched, rows)


def test_rows_before_the_loss_are_used():
    """The rows before the first missing one can be used."""
    rows = dense(600, 1)
    with handing_ranks(2) as of:
        sequence = of.tables.open()
        of.prefill(sequence, rows[:], 0, 250)
        of.each("open", "a", 600)
        of.each("finish_rows", "a", sequence, 250)
        fetched = Fetched(600)
        pull = Pull(of.ticket("a", 600), 0, (0, HEADS), fetched)
        thread = threading.Thread(target=pull.run)
        thread.start()
        wait_until(lambda: pull.came[:250].all())
        pull.cancel("lost")
        thread.join(5)
        assert pull.first_missing() == 250 and pull.report.error == "lost"


def test_tickets():
    place = Place("host", 5, 0, 0, 4)
    ticket = Ticket("a", 3, wire.digest_of_tokens([1, 2, 3]), {"dtype": "float32"}, (place,))
    params = ticket.params()
    assert Ticket.of(params) == ticket
    assert Ticket.of(None) is None and Ticket.of({"do_remote_prefill": True}) is None
    assert Ticket.of(params | {"do_remote_prefill": False}) is None
    assert wire.digest_of_tokens([1, 2, 3]) != wire.digest_of_tokens([1, 3, 2])
    fields = params[wire.FIELD]
    for wrong in ({"version": 2}, {"tokens": "3"}, {"places": []}, {"places": [{"host": 1}]}, {"colour": 1}, {"id": 5}):
        with pytest.raises(WireError):
            Ticket.of(params | {wire.FIELD: fields | wrong})
    with pytest.raises(WireError):
        Ticket.of(params | {wire.FIELD: "text"})


def prefill_only(name: str, tokens: list[int]) -> Request:
    return Request(name, tokens, SamplingParams(num_tokens_to_generate=1), handoff=f"{name}'s")


def text_of(name: str, tokens: list[int], new: int) -> Request:
    return Request(name, tokens, SamplingParams(num_tokens_to_generate=new))


PROMPT = [*b"abcdefghijklmnopqrstuvwxyz123456"]
LATE = "its lease has ended"


def plain_engine(size: int = 100, waste: int = 0) -> tuple[Engine, Calls]:
    calls, cache = Calls(), PlainSession(Parrot(), size, 257)
    return Engine(cache, ByteTokenizer(256), chunks=16, waste=waste, handed=calls), calls


def ended(outputs) -> list[tuple[str, str]]:
    return [(output.request, output.finish) for output in outputs if output.finish]


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"sliding_window": 7}, ""),  # of no layer
        ({"sliding_window": 7, "use_sliding_window": True}, "windows: [None] here, [7] there"),
        ({"num_experts_per_tok": 3}, "num_experts_per_tok: 8 here, 3 there"),
        ({"norm_topk_prob": True}, "norm_topk_prob: False here, True there"),
        ({"hidden_act": "gelu"}, "hidden_act: silu here, gelu there"),
    ],
)
def test_models_that_compute_other_rows_of_the_same_weights_differ(tmp_path, changes, fact):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    models = [Qwen3MoeConfig(), Qwen3MoeConfig(**changes)]
    ours, theirs = (identity(config, "float32", tmp_path) for config in models)
    assert difference(ours, theirs) == fact


def test_a_handoff_is_answered_when_it_begins_and_pinned_when_it_is_done():
    engine, calls = plain_engine()
    engine.add(prefill_only("a", PROMPT))
    assert ended(engine.step()) == [("a", "length")] and not engine.pinned
    assert ended(engine.step()) == [] and [*engine.pinned] == ["a's"] and engine.idle
    assert calls.seen == [("open", "a's", 32), ("finish", "a's", 0), ("finish", "a's", 16), ("finish", "a's", 32)]
    engine.add(text_of("b", [*PROMPT[:20], *b"zz"], 3))  # shares a prefix with the pinned sequence
    outputs = engine.step() + engine.step() + engine.step()
    assert [output.reused for output in outputs if output.first] == [20] and "a's" in engine.pinned
    engine.release("a's")
    engine.release("a's")
    assert calls.seen[4:] == [("close", "a's", LATE)] and not engine.pinned
    engine.add(prefill_only("c", [*PROMPT, *b"xyz"]))
    assert engine.step()[0].reused == 32  # kept for later prompts


def test_pinned_tokens_count_against_the_cache():
    engine, _ = plain_engine(40)
    engine.add(prefill_only("a", PROMPT))
    engine.step()
    engine.step()
    engine.add(text_of("b", PROMPT[::-1], 2))
    engine.add(text_of("c", [1, 2, 3], 2))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert {name for name, _ in ended(outputs)} == {"c"}  # it fits beside the pinned tokens
    for _ in range(3):
        assert not engine.step() and engine.blocked and len(engine.waiting) == 1
    engine.release("a's")
    outputs = [output for _ in range(5) for output in engine.step()]
    assert {name for name, _ in ended(outputs)} == {"b"}


def test_a_prompt_waits_for_the_release_of_its_own_prefix():
    """It needs a page to fork the pinned sequence, and there is none."""
    engine, _ = plain_engine(waste=4)
    engine.add(prefill_only("a", PROMPT))
    engine.step()
    engine.step()
    engine.add(text_of("b", [*PROMPT, *b"0" * 67], 1))
    assert not engine.step() and engine.blocked
    engine.release("a's")
    outputs = [output for _ in range(6) for output in engine.step()]
    assert ended(outputs) == [("b", "length")] and outputs[0].reused == 32


def test_a_release_ends_a_prefill():
    engine, calls = plain_engine()
    engine.add(prefill_only("a", PROMPT))
    engine.step()
    engine.release("a's")
    assert engine.idle and not engine.pinned and calls.seen[-1] == ("close", "a's", LATE)
    engine.add(prefill_only("b", PROMPT * 2))
    assert engine.step()[0].reused == 16
    engine.cancel("b")
    assert engine.step() == [RequestOutput("b", finish="cancelled")] and not engine.running


@pytest.mark.parametrize(("window", "reused"), [(None, 32), (8, 0)])
def test_a_decoder_gets_no_keys_that_windows_may_have_freed(window, reused):
    """The kept sequence may have lost keys outside every window, and a decoder reads all."""
    engine, _ = plain_engine(200)
    engine.cache.window = window
    engine.add(text_of("a", PROMPT * 2, 1))
    while not engine.idle:
        engine.step()
    engine.add(prefill_only("b", [*PROMPT, *b"0" * 16]))
    assert engine.step()[0].reused == reused
    engine.cancel("b")


def test_wrong_rows_are_never_finished():
    """The last rows of a prompt whose logits are NaN; a rank that read the others is told."""
    engine, calls = plain_engine()
    engine.add(prefill_only("a", [*b"!" * 20]))
    engine.step()
    assert ended(engine.step()) == [("a", "error")]
    assert calls.seen[-2:] == [("finish", "a's", 16), ("close", "a's", NAN)]
    assert not engine.pinned and engine.cache.room() == 100


def _hand_over(prompts: list[list[int]]) -> None:
    """Rank 0 fetches the rows of prompts, of all ranks, while they are prefilled in chunks."""
    start()
    of = session(cache_tokens=512)
    handed = HandedSequences(of.tables, of.cache, of.cp.rank)
    engine = Engine(of, ByteTokenizer(256), chunks=16, handed=handed)
    listener = bind("127.0.0.1", 0)
    shape = of.cache.layers[0][0].shape[2:]
    rows = rows_port.RowsFormat(2, 0, *shape, shape[1], "float32")
    place = Place("127.0.0.1", listener.getsockname()[1], of.cp.rank, 0, shape[0])
    places = [place] * of.cp.n
    dist.all_gather_object(places, place)
    model = {"num_hidden_layers": 2, "head_dim": shape[1], "dtype": "float32"}
    leases = Leases(30, lambda name, late: None)
    with rows_port.RowsPort(handed, rows, listener, leases).running():
        for i, prompt in enumerate(prompts):
            request = prefill_only(str(i), prompt)
            engine.add(request)
            outputs = engine.step()
            fetched = torch.full((2, 2, len(prompt), *shape), torch.nan)

            def write(layer, positions, keys, values, into=fetched):
                into[layer, :, positions] = torch.stack([keys, values])

            pull = Pull(Ticket(request.handoff, len(prompt), "", model, tuple(places)), 0, (0, shape[0]), write)
            thread = threading.Thread(target=pull.run)
            if not of.cp.rank:
                thread.start()
            while not engine.pinned:
                outputs += engine.step()
            (run,) = engine.pinned.values()
            positions = of.tables.positions(run.sequence, of.cp.rank)
            slots = torch.from_numpy(of.tables.slots(run.sequence, of.cp.rank))
            cached = torch.stack([torch.stack(of.cache.rows(layer, slots)) for layer in range(2)])
            everyone = [None] * of.cp.n
            dist.all_gather_object(everyone, (positions, cached))
            if not of.cp.rank:
                thread.join(10)
                assert not pull.report.error and not fetched.isnan().any()
                for where, expected in everyone:
                    assert torch.equal(fetched[:, :, where], expected)
            assert outputs[0].finish == "length" and outputs[0].reused == (40 if i else 0)
            dist.barrier()
            engine.release(request.handoff)


@pytest.mark.parametrize("n", [1, 3])
def test_the_rows_are_those_of_the_caches(ranks, n):
    first = [(x * 7) % 29 for x in range(61)]
    ranks(n, _hand_over, [first, first[:40] + [3, 1, 4, 1, 5, 9] * 4])
