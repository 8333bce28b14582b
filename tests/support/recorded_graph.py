"""A CUDA graph that is pretended on the CPU: its operations run again on the same tensors, and nothing else does."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_OF_THE_HOST = ("item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero")
_recording: list["RecordedGraph"] = []  # the graph that is captured, if any


class RecordedGraph(TorchDispatchMode):
    """As `torch.cuda.CUDAGraph`. It has the operations between its begin and end, with their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple, dict, list[Tensor]]] = []
        self.replays = 0
        self.broken = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.broken |= func._schema.name.removeprefix("aten::") in _OF_THE_HOST
        return self.add(func, *args, **(kwargs or {}))

    def add(self, call: Callable, *args, **how):
        result = call(*args, **how)
        self.calls.append((call, args, how, _tensors(result)))
        return result

    @torch.inference_mode()
    def replay(self) -> None:
        self.replays += 1
        for call, args, how, results in self.calls:
            for old, new in zip(results, _tensors(call(*args, **how)), strict=True):
                if old is not new:
                    old.copy_(new)


def _tensors(tree: object) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


@contextmanager
def recording(graph: RecordedGraph, pool: object = None, stream: object = None, capture_error_mode: str = "global"):
    _recording.append(graph)
    try:
        with graph:
            yield
    finally:
        _recording.pop()
    if graph.broken:
        raise RuntimeError("operation not permitted when stream is capturing")


def launch(kernel: Callable) -> Callable:
    """A launch of a kernel on a GPU: one operation."""

    def launched(*args, **how) -> None:
        with _disable_current_modes():
            _recording[-1].add(kernel, *args, **how) if _recording else kernel(*args, **how)

    return launched


def _merge(out, lse, outs, lses) -> None:
    out.copy_((lses.softmax(0).unsqueeze(-1) * outs).sum(0))
    lse.copy_(lses.logsumexp(0))


@contextmanager
def recorded_graphs():
    """Decode steps attend to pages, and what PyTorch has for CUDA graphs is pretended."""
    from megatron.context_parallel.inference import decode_attention, decode_pages
    from megatron.context_parallel.kernels.paged import PagedKernel
    from tests.support.gpu_kernels import attend_to_pages

    def attend(self: PagedKernel, *given) -> None:
        attend_to_pages(*given)

    stream = SimpleNamespace(device=torch.device("cpu"), wait_stream=lambda other: None)
    cuda = {
        "Stream": lambda device: stream,
        "current_stream": lambda device=None: stream,
        "set_stream": lambda stream: None,
        "stream": lambda stream: nullcontext(),
        "graph_pool_handle": object,
        "CUDAGraph": RecordedGraph,
        "graph": recording,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(decode_attention, "can_attend_to_pages", lambda *_: True)
        patch.setattr(PagedKernel, "forward", launch(attend))
        patch.setattr(decode_pages, "merge_rows", launch(_merge))
        yield
