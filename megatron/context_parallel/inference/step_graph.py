"""CUDA graphs of decode steps: a step is recorded once, and then launched as a whole."""

import logging
from collections.abc import Callable

import torch


class GraphPool:
    """What the graphs of a session share: the stream on which they are captured, and their memory.

    They may share memory: one runs at a time, and none reads there what another has left.

    Attributes:
        frozen: whether no weight is replaced any more, so that nobody needs to look.
    """

    def __init__(self, device: torch.device, frozen: bool = False) -> None:
        self.frozen = frozen
        self.stream = torch.cuda.Stream(device)
        self.memory = torch.cuda.graph_pool_handle()


class StepGraph:
    """A CUDA graph of a step.

    The first call runs the step and captures it. The next ones replay the graph. If PyTorch cannot capture it, a
    warning is logged, and each call runs the step.
    """

    def __init__(self, pool: GraphPool) -> None:
        self.pool = pool
        self.graph: torch.cuda.CUDAGraph | None = None
        self._reads: object = None
        self._fails = False

    def __call__(self, run: Callable[[], object], reads: object) -> None:
        """Runs a step.

        Args:
            run: the step, the same in each call: operations of fixed shapes on fixed tensors. The host reads none.
            reads: what the graph has as constants, such as the addresses of weights. If it changes, the step is
                captured again.
        """
        if self._fails:
            run()
        elif self.graph is not None and reads == self._reads:
            self.graph.replay()
        else:
            self._run_and_capture(run)
            self._reads = reads

    def _run_and_capture(self, run: Callable[[], object]) -> None:
        """The run is the warm-up: it compiles kernels, and makes buffers and the workspace of cuBLAS on this stream."""
        stream = self.pool.stream
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            run()
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=self.pool.memory, stream=stream, capture_error_mode="thread_local"):
                run()
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # a capture that fails leaves its own
            cause = str(error.__context__ or error).partition("\n")[0]  # the first error, not that of the end
            logging.getLogger(__name__).warning("decode steps run without a CUDA graph: %s", cause)
            self.graph, self._fails = None, True
            return
        self.graph = graph
