"""The interface of a `Session` on one rank without a cache: the whole of each sequence is computed again."""

from collections.abc import Collection, Mapping, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor


class PlainSession:
    """A slow and simple session. An engine over a real session must generate the same."""

    window = None

    def __init__(self, model: GPTModel, cache_tokens: int, vocabulary: int) -> None:
        self.model, self.cache_tokens, self.vocabulary = model, cache_tokens, vocabulary
        self.sequences: dict[int, list[int]] = {}
        self.steps: list[dict[int, int]] = []  # new tokens of each sequence
        self.scored: dict[int, tuple[list[int], Tensor]] = {}
        self._next = 0

    def open(self) -> int:
        self._next += 1
        self.sequences[self._next] = []
        return self._next

    def fork(self, sequence: int, tokens: int) -> int:
        assert tokens <= len(self.sequences[sequence])
        fork = self.open()
        self.sequences[fork] = self.sequences[sequence][:tokens]
        return fork

    def free(self, sequence: int) -> None:
        del self.sequences[sequence]

    def holds(self, sequence: int, tokens: int) -> bool:
        return tokens <= len(self.sequences[sequence])

    def room(self) -> int:
        return self.cache_tokens - sum(map(len, self.sequences.values()))

    def can_copy(self) -> bool:
        return True

    @torch.no_grad()
    def forward(
        self, new: Mapping[int, Sequence[int]], prefill: str | None = None, scored: Collection[int] = ()
    ) -> dict[int, Tensor]:
        self.steps.append({sequence: len(tokens) for sequence, tokens in new.items()})
        self.scored = {}
        found = {}
        for sequence, tokens in new.items():
            assert tokens
            self.sequences[sequence] += tokens
            whole = torch.tensor([self.sequences[sequence]])
            positions = torch.arange(whole.shape[1])[None]
            found[sequence] = self.model(whole, positions, None, runtime_gather_output=True)[0, -1].float()
            if sequence in scored:
                places = [*range(whole.shape[1] - len(tokens), whole.shape[1])]
                prefixes = [(whole[:, : place + 1], positions[:, : place + 1]) for place in places]
                rows = [self.model(*prefix, None, runtime_gather_output=True)[0, -1] for prefix in prefixes]
                self.scored[sequence] = places, torch.stack(rows).float()
        assert self.room() >= 0
        return found

    def share(
        self, values: Mapping[int, Sequence[float]], width: int = 1, of: Sequence[int] | None = None
    ) -> dict[int, list[float]]:
        assert {*map(len, values.values())} == {width}
        return {sequence: list(value) for sequence, value in values.items()}
