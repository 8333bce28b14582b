"""The log-probabilities of a prompt's own tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron.context_parallel.kernels.to_device import to_device

from .sampling import Token

ROWS = 64  # rows of float64 logits at once


class SharesNumbers(Protocol):
    """What is needed of a session."""

    scored: dict[int, tuple[list[int], Tensor]]

    def share(
        self, values: Mapping[int, Sequence[float]], width: int = 1, of: Sequence[int] | None = None
    ) -> dict[int, list[float]]: ...


def score_prompt(
    session: SharesNumbers, sequence: int, prompt: Sequence[int], start: int, stop: int, top: int
) -> list[Token]:
    """The tokens of a prompt that follow its positions from `start` to `stop`, which the last pass has computed.

    Each rank has the logits of some positions. Every rank calls it, and gets all of them.

    Args:
        session: the session of the pass.
        sequence: its number, one of those that were scored.
        prompt: its tokens.
        start, stop: positions; the position after the last one is in the prompt.
        top: the length of `Token.top`.
    """
    width = 1 + 2 * top
    numbers = torch.zeros(stop - start, width, dtype=torch.float64)
    positions, logits = session.scored.get(sequence, ([], torch.empty(0)))
    wanted = [row for row, position in enumerate(positions) if start <= position < stop]
    if wanted:
        next_tokens = [prompt[positions[row] + 1] for row in wanted]
        told = _told(logits, wanted, next_tokens, top).cpu()  # once: the host waits for it
        count = (told.shape[-1] - 1) // 2
        into = [positions[row] - start for row in wanted]  # rows of `numbers`
        numbers[into, 1:] = -1.0
        numbers[into, : 1 + count] = told[:, : 1 + count]
        numbers[into, 1 + top : 1 + top + count] = told[:, 1 + count :]
    shared = session.share({sequence: numbers.flatten().tolist()}, numbers.numel(), of=[sequence])[sequence]
    found = []
    for i, (logprob, *pairs) in enumerate(torch.tensor(shared, dtype=torch.float64).view(-1, width).tolist()):
        likeliest = zip(pairs[:top], pairs[top:], strict=True)
        kept = [(int(token), value) for token, value in likeliest if token >= 0 and value > -math.inf]
        found.append(Token(prompt[start + i + 1], logprob, tuple(kept)))
    return found


def _told(logits: Tensor, rows: list[int], next_tokens: list[int], top: int) -> Tensor:
    """For each row the log-probability of its next token, and the likeliest tokens with theirs.

    Returns:
        float64 [rows, 1 + 2 * k] on the device of `logits`; k: `top`, or less in a small vocabulary.
    """
    where = to_device(torch.tensor([rows, next_tokens]), logits.device)
    parts = []
    for some, of_some in zip(where[0].split(ROWS), where[1].split(ROWS), strict=True):
        logprobs = logits.index_select(0, some).double().log_softmax(-1)
        values, tokens = logprobs.topk(min(top, logprobs.shape[-1]))
        parts.append(torch.cat([logprobs.gather(-1, of_some.unsqueeze(-1)), tokens.double(), values], -1))
    return torch.cat(parts)
