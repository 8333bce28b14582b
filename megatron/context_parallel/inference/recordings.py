"""The passes that a session has recorded: those of a shape that comes again and again."""

from collections import Counter

import torch
from torch import Tensor

from megatron.context_parallel.integration.spec import AttentionOverride

from .cached_model import CachedModel, PassInputs
from .recorded import Recorded, record

OFTEN = 8  # decode steps of as many rows before they are recorded
RECORDINGS = 64  # at most


class Recordings:
    """Decode steps of a model, recorded where they come often.

    Where nothing is sent and the linear layers have little to do, Python is most of the time of a pass.

    Attributes:
        passes: the recorded ones, by their rows.
        seen: how many passes of so many rows were not recorded.
    """

    def __init__(self, model: CachedModel) -> None:
        self.model = model
        self.passes: dict[int, Recorded] = {}
        self.seen = Counter[int]()

    def __call__(self, attend: AttentionOverride, inputs: PassInputs) -> Tensor:
        """The logits [1, wanted, vocabulary] of a decode step. The first ones of a recording are compared."""
        rows = len(inputs.tokens)
        recorded = self._current(rows)
        if recorded and recorded.checked:
            return recorded(attend, *inputs)
        logits = self.model(attend, *inputs)
        if recorded:
            recorded.checked = torch.equal(recorded(attend, *inputs), logits)  # rows of the pass are only written again
            if not recorded.checked:
                del self.passes[rows]
        elif len(self.passes) < RECORDINGS:
            self._count(rows, inputs)
        return logits

    def _current(self, rows: int) -> Recorded | None:
        """The recorded pass of so many rows. If the model has other tensors by now, all are forgotten."""
        recorded = self.passes.get(rows)
        if recorded and not recorded.current:
            self.passes.clear()
            self.seen.clear()
            return None
        return recorded

    def _count(self, rows: int, inputs: PassInputs) -> None:
        """Counts a pass, and records it if there were enough like it."""
        self.seen[rows] += 1
        if self.seen[rows] == OFTEN and (found := record(self.model, inputs)):
            self.passes[rows] = found
