"""The recorded passes of a session, for shapes that occur often."""

from collections import Counter

import torch
from torch import Tensor

from megatron.context_parallel.integration.spec import AttentionOverride

from .cached_model import CachedModel, PassInputs
from .recorded import Recorded, record

OFTEN = 8  # decoding steps with the same number of rows before they are recorded
RECORDINGS = 64  # maximum number


class Recordings:
    """Decoding steps of a model, recorded if they occur often.

    Without communication and with small linear layers, a pass spends most of its time in Python.

    Attributes:
        passes: the recorded passes, by number of rows.
        seen: the number of passes that were not recorded, by number of rows.
    """

    def __init__(self, model: CachedModel) -> None:
        self.model = model
        self.passes: dict[int, Recorded] = {}
        self.seen = Counter[int]()

    def __call__(self, attend: AttentionOverride, inputs: PassInputs) -> Tensor:
        """The logits [1, wanted, vocabulary] of a decoding step. The first ones of a recording are compared."""
        rows = len(inputs.tokens)
        recorded = self._current(rows)
        if recorded and recorded.checked:
            return recorded(attend, *inputs)
        logits = self.model(attend, *inputs)
        if recorded:
            recorded.checked = torch.equal(recorded(attend, *inputs), logits)  # rewrites the cache rows
            if not recorded.checked:
                del self.passes[rows]
        elif len(self.passes) < RECORDINGS:
            self._count(rows, inputs)
        return logits

    def _current(self, rows: int) -> Recorded | None:
        """The recorded pass with so many rows. If the model's tensors were replaced, all recordings are dropped."""
        recorded = self.passes.get(rows)
        if recorded and not recorded.current:
            self.passes.clear()
            self.seen.clear()
            return None
        return recorded

    def _count(self, rows: int, inputs: PassInputs) -> None:
        """Counts a pass, and records it if there were enough of its kind."""
        self.seen[rows] += 1
        if self.seen[rows] == OFTEN and (found := record(self.model, inputs)):
            self.passes[rows] = found
