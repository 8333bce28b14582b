"""The recorder has the operations of a rank and its position."""

import mmap

import pytest
import torch

from megatron.context_parallel import ContextParallel, context_parallel_attention
from megatron.context_parallel.runtime.comm import torch_works as works
from megatron.context_parallel.runtime.comm.flight_recorder import KEPT, Position, Recorder, recorder


def in_mesh() -> Recorder:
    notes = Recorder()
    notes.enter("forward", 118)
    notes.at_layer(7)
    notes.begin("mesh", backward=False)
    notes.at_step(3)
    notes.need("KV", 5, 1)
    return notes


def test_a_position_as_words():
    notes = in_mesh()
    assert str(notes.position) == "iteration 118, layer 7, forward of mesh, step 3"
    notes.wait("ring", [("receive", 1)])
    assert str(notes.position) == "iteration 118, layer 7, forward of mesh, step 3, waiting for KV chunk 5 from rank 1"
    notes.waited("ring", [("receive", 1)])
    assert str(notes.position) == "iteration 118, layer 7, forward of mesh, step 3"
    notes.end()
    assert str(notes.position) == "iteration 118, forward, layer 7"
    notes.enter("optimizer")
    assert str(notes.position) == "iteration 118, optimizer"
    notes.enter("forward", 119)
    assert (notes.position.iteration, notes.position.done) == (119, 1)


@pytest.mark.parametrize(
    "waits, words",
    [
        (("receive", "ring", (2,)), "waiting for rank 2 on channel ring"),  # another rank than the one that sends KV
        (("send", "ring", (2,)), "waiting to send to rank 2 on channel ring"),
        (("gather", "gather", (0, 2)), "waiting to gather with ranks 0, 2 on channel gather"),
        (("all_reduce", "", (0, 2)), "waiting in all_reduce for ranks 0, 2"),
    ],
)
def test_other_waits_as_words(waits, words):
    assert str(in_mesh().position._replace(waits=waits)).endswith(f", step 3, {words}")


def test_a_recomputation_is_in_the_backward_phase():
    at = Position(iteration=2, phase="backward", layer=1, plan="ring")
    assert str(at) == "iteration 2, backward, layer 1, forward of ring"


def test_each_note_is_in_the_memory():
    notes, memory = Recorder(), mmap.mmap(-1, 512)
    notes.memory, notes.size = memory, 512
    for note in (lambda: notes.enter("save", 3), lambda: notes.at_layer(2), lambda: notes.wait("ring", [("send", 1)])):
        before = notes.position.notes
        note()
        assert notes.position.notes == before + 1
        assert Position.read(memory[:512].decode().rstrip()) == notes.position


def test_a_text_that_is_no_position():
    for text in ("", "nonsense", "(1, 2", "3", "__import__('os')"):
        with pytest.raises((ValueError, SyntaxError, TypeError)):
            Position.read(text)


def test_the_last_operations_are_kept():
    notes = in_mesh()
    for number in range(KEPT + 7):
        notes.launch("ring", [("receive", number), ("receive", number), ("send", 0)])
    lines = notes.operations()
    assert len(lines) == KEPT
    assert lines[-1].endswith(
        "launch ring: receive from rank 56, send to rank 0 (iteration 118, layer 7, forward of mesh, step 3)"
    )
    assert "rank 7," in lines[0]


def recorded(strategy: str) -> tuple[list[str], Position, list[Position]]:
    """What a rank records of one attention, and its position at each wait."""
    waits = []
    wait = recorder.wait

    def seen(channel, ends):
        wait(channel, ends)
        waits.append(recorder.position)

    recorder.wait = seen
    recorder._operations.clear()
    recorder.enter("forward", 9)
    recorder.at_layer(4)
    cp = ContextParallel(strategy)
    q, k, v = (torch.randn(8, 1, 2, 4, requires_grad=True) for _ in range(3))
    out = context_parallel_attention(q, k, v, cp)
    recorder.enter("backward")
    out.sum().backward()
    return recorder.operations(), recorder.position, waits


def test_ranks_record_a_ring(ranks):
    for rank, (lines, last, waits) in enumerate(ranks(3, recorded, "ring")):
        before, after = (rank - 1) % 3, (rank + 1) % 3
        assert str(last) == "iteration 9, backward, layer 4"
        forward = [at for at in waits if not at.backward]
        assert {(at.iteration, at.layer, at.plan) for at in waits} == {(9, 4, "ring")}
        # The keys of the rank before, and in the next step those of the one before it, both from the rank before.
        assert {at.needs for at in forward if at.needs} == {("KV", before, before), ("KV", after, before)}
        assert {at.waits for at in waits} == {("receive", "ring", (before,)), ("send", "ring", (after,))}
        assert f"waiting for KV chunk {before} from rank {before}" in str(forward[0])
        assert sum(" launch " in line for line in lines) == sum(" done " in line for line in lines) > 0


def test_ranks_record_gathers_and_swapped_heads(ranks):
    _, _, waits = ranks(2, recorded, "allgather")[1]
    assert ("gather", "gather", (0,)) in {at.waits for at in waits}
    _, _, waits = ranks(2, recorded, "ulysses")[0]
    assert ("receive", "heads", (1,)) in {at.waits for at in waits}


class Broken:
    def wait(self):
        raise RuntimeError("Connection closed by peer")


def test_a_failed_wait_says_where_and_keeps_the_position(monkeypatch):
    monkeypatch.setattr(works, "recorder", in_mesh())
    batch = works.WorkBatch([Broken(), Broken()], "ring", [("receive", 1), ("send", 2)])
    with pytest.raises(RuntimeError, match="step 3, waiting for KV chunk 5 from rank 1: Connection closed by peer"):
        batch.wait()
    assert works.recorder.position.waits == ("receive", "ring", (1,))
