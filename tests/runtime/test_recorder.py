"""The recorder has the operations of a rank and its position."""

import mmap

import pytest
import torch

from megatron.context_parallel import ContextParallel, context_parallel_attention
from megatron.context_parallel.runtime.comm import torch_works as works
from megatron.context_parallel.runtime.comm.flight_recorder import KEPT, Position, Recorder, recorder
from megatron.context_parallel.trainer.faults import rank_file
from megatron.context_parallel.trainer.faults.wait_graph import culprits, describe_culprits


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
        (("barrier", "", (*range(4096),)), f"waiting in barrier for ranks {', '.join(map(str, range(16)))} ..."),
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


def test_a_wait_for_thousands_of_ranks_fits_into_the_memory():
    notes, memory = Recorder(), mmap.mmap(-1, 512)
    notes.memory, notes.size = memory, 512
    others = [*range(0, 900, 3), *range(903, 9000, 3)]  # every third rank but 900
    for ranks in (others, others[-5:] + others[:-5], [5, 1, 9, *others], others[:17], [7, 7, 8]):
        notes.wait("heads", [("receive", rank) for rank in ranks for _ in range(2)])
        assert notes.position.waits == ("receive", "heads", tuple(dict.fromkeys(ranks)))
        assert Position.read(memory[:512].decode().rstrip()) == notes.position == Position.read(notes.position.text)


def test_a_text_that_is_no_position():
    for text in ("", "nonsense", "(1, 2", "3", "__import__('os')", "(1, 1, 1, '', 0, '', False, 0, None, 5)"):
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


class GpuEvent:
    """As `torch.cuda.Event`: it is reached when the GPU gets there."""

    def __init__(self, reached: bool = False) -> None:
        self.reached = reached

    def record(self) -> None:
        self.reached = False

    def query(self) -> bool:
        if self.reached is None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.reached


def on_a_gpu(rank: int, batches: int) -> tuple[Recorder, list[GpuEvent]]:
    """A rank of a ring of 3 whose host has queued an iteration. Its GPU will wait for both neighbours in each batch."""
    notes, events = Recorder(), []
    notes.enter("forward", 5)
    for step in range(batches):
        notes.begin("ring", backward=False)
        notes.at_step(step)
        ends = [("receive", (rank - 1) % 3), ("send", (rank + 1) % 3)]
        notes.launch("ring", ends)
        notes.wait("ring", ends)
        events.append(GpuEvent())
        notes.waited("ring", ends, events[-1])
        notes.end()
    notes.enter("optimizer")
    return notes, events


def test_a_rank_that_stalls_is_named_though_all_hosts_are_at_the_optimizer():
    """The host of rank 1 stands still in the data; those of the others wait for their GPUs to finish the iteration."""
    (first, events), (third, others) = on_a_gpu(0, 3), on_a_gpu(2, 3)
    stalled = Recorder()
    stalled.enter("data", 5)
    for queued in (events, others):
        queued[0].reached = True
    positions = {0: first.awaited_by_gpu, 1: stalled.position, 2: third.awaited_by_gpu}
    assert str(first.position) == "iteration 5, optimizer"
    assert str(positions[0]) == "iteration 5, forward of ring, step 1, waiting for ranks 2, 1 on channel ring"
    assert culprits(positions) == [1]
    assert describe_culprits([1], positions) == "rank 1 makes no progress at iteration 5, data"
    for event in events:
        event.reached = True
    assert first.awaited_by_gpu is None
    events[2].reached = None  # the GPU failed
    assert first.awaited_by_gpu.step == 2


def test_waits_that_a_gpu_has_passed_are_forgotten():
    notes = Recorder()
    for _ in range(100):
        notes.waited("ring", [("send", 1)], GpuEvent(reached=True))
    assert len(notes._queued) <= 1
    held = GpuEvent()
    notes.waited("ring", [("send", 1)], held)
    for _ in range(100):
        notes.waited("ring", [("send", 1)], GpuEvent(reached=True))
    assert len(notes._queued) == 101  # in order: nothing after it has been reached
    held.reached = True
    for _ in range(110):
        notes.waited("ring", [("send", 1)], GpuEvent(reached=True))
    assert len(notes._queued) < 5


def test_on_a_gpu_an_event_follows_each_wait(monkeypatch):
    order = []

    class Work:
        def wait(self):
            order.append("wait")

    class Event(GpuEvent):
        def record(self):
            order.append("record")

    monkeypatch.setattr(works.recorder, "_queued", type(works.recorder._queued)())
    works.WorkBatch([Work()], "ring", [("receive", 1)]).wait()
    assert order == ["wait"] and works.recorder.awaited_by_gpu is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for captures in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        works.WorkBatch([Work()], "ring", [("receive", 1)]).wait()
    assert order == ["wait", "wait", "wait", "record"]
    assert works.recorder.awaited_by_gpu.waits == ("receive", "ring", (1,))


def test_a_stuck_rank_is_where_its_gpu_is(monkeypatch):
    notes, events = on_a_gpu(0, 2)
    monkeypatch.setattr(rank_file, "recorder", notes)
    file = rank_file.RankFile(0, 3, "job")
    try:
        at = file.look_up(set())
        assert at.waits == ("receive", "ring", (2, 1)) and at.step == 0 and at.notes == notes.position.notes
        assert rank_file.read_rank_file(file.path)[1] == at
        for event in events:
            event.reached = True
        assert file.look_up(set()).phase == "optimizer"
    finally:
        file.remove()


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
