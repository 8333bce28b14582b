"""The labels of a plan's blocks and operations in timelines."""

from collections.abc import Iterable

from megatron.context_parallel.plan.ir import AllGather, Attend, Comm, ReduceScatter, Send, SwapHeads


def label(what: Iterable[Attend | Comm | SwapHeads]) -> str:
    """The name of one block, or of the operations of a batch."""
    return ", ".join(map(_named, what))


def _named(what: Attend | Comm | SwapHeads) -> str:
    match what:
        case Attend():
            some = "" if what.share == 1 else f", {what.share:.3g} of the heads"
            return f"queries {_list(what.q_chunks)} x keys {_list(what.kv_chunks)}{some}"
        case AllGather() | ReduceScatter():
            return f"{'gather' if isinstance(what, AllGather) else 'reduce'} {what.tensor} {_list(what.chunks)}"
        case SwapHeads():
            return f"swap {' '.join(what.tensors)}"
        case _:
            way = "to" if isinstance(what, Send) else "from"
            return f"{what.tensor} {what.chunk} {way} {what.peer}"


def _list(chunks: tuple[int, ...]) -> str:
    return ",".join(map(str, chunks))
