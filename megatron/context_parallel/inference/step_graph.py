"""CUDA graphs of decode steps: a step is recorded once, and then launched as a whole."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether logits of one dtype differ by no more than roundings do. Reads the result on the host."""
    # In 16 bits a fused kernel may round elsewhere. In 32 bits, products of few rows add in another order.
    roundings = 16 if expected.dtype.itemsize == 2 else 100
    bound = roundings * torch.finfo(expected.dtype).eps
    found, expected = found.float(), expected.float()
    return bool((found - expected).norm() <= bound * expected.norm())


class GraphPool:
    """What the graphs of a session share: the stream on which they are captured, and their memory.

    They may share memory: one runs at a time, and none reads there what another has left.

    Attributes:
        frozen: whether no weight is replaced any more, so that nobody needs to look.
        fails: whether a capture failed. No other is tried: torch 2.11's allocator does not recover from it.
    """

    def __init__(self, device: torch.device, frozen: bool = False) -> None:
        self.frozen = frozen
        self.fails = False
        self.stream = torch.cuda.Stream(device)
        self.memory = torch.cuda.graph_pool_handle()


class StepGraph:
    """A CUDA graph of a step.

    The first call runs the step and captures it. The next ones replay the graph. If PyTorch cannot capture a step of
    the session, or if its first replay has other logits, a warning is logged, and each call runs the step.
    """

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool
        self.graph: torch.cuda.CUDAGraph | None = None
        self._reads: object = None
        self._fails = False

    def __call__(self, run: Callable[[], Tensor], reads: object) -> None:
        """Runs a step.

        Args:
            run: the step, the same in each call: operations of fixed shapes on fixed tensors. The host reads none. It
                returns the logits, also a fixed tensor. A step may run twice on the same inputs.
            reads: what the graph has as constants, such as the addresses of weights. If it changes, the step is
                captured again.
        """
        if self.graph is not None and reads == self._reads:
            self.graph.replay()
        elif self._fails or self.pool.fails:
            run()
        else:
            self._run_and_capture(run)
            self._reads = reads

    def _run_and_capture(self, run: Callable[[], Tensor]) -> None:
        """The run is the warm-up: it compiles kernels, and makes buffers and the workspace of cuBLAS on this stream."""
        stream = self.pool.stream
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            logits = run()
        current.wait_stream(stream)
        expected = logits.clone()
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=self.pool.memory, stream=stream, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own
            self.pool.fails = True
            cause = str(error.__context__ or error).partition("\n")[0]  # the first error, not that of the end
            self._give_up(cause)
            return
        logits.zero_()  # so that a replay that does nothing is seen
        graph.replay()
        if close(logits, expected):
            self.graph = graph
            return
        run()
        self._give_up("it has other logits than the step")

    def _give_up(self, cause: str) -> None:
        logging.getLogger(__name__).warning("decode steps run without a CUDA graph: %s", cause)
        self.graph, self._fails = None, True
