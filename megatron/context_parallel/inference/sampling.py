"""Samples the next tokens of sequences from their logits: greedy, or by temperature, top-k and top-p."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.inference.sampling_params import SamplingParams
from torch import Tensor

from .faults import MISTAKE, NAN

_FAULTS = {-1.0: NAN, -2.0: MISTAKE}  # instead of a token


@dataclass(frozen=True)
class Token:
    """A sampled token.

    Attributes:
        id: the token.
        logprob: the natural logarithm of its probability by the model, before temperature, top-k and top-p.
        top: the most likely tokens with their log-probabilities, in descending order.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def choose_tokens(
    logits: Sequence[Tensor], asked: Sequence[tuple[SamplingParams, int, int]]
) -> list[Token | Exception]:
    """The next token of each of some sequences, or its error.

    A sample depends only on its seed and position, not on the number of ranks or on other sequences.

    Args:
        logits: [vocabulary] for each sequence, of the previous row; float32 or another floating dtype.
        asked: for each sequence the parameters, the seed, any integer, and the position of the new token, from 0. Of
            megatron-core's parameters, `top_k` 1 or `temperature` 0 selects the most likely token, the first of equals;
            `top_k` 0 and `top_p` 0 or 1 disable these; `top_n_logprobs` is the length of `Token.top`.

    Returns:
        Tokens. A FloatingPointError replaces a token if a logit is NaN or all are infinite.
    """
    rows = torch.stack([*logits]).to("cpu", torch.float64)
    logprobs, likeliest = rows.log_softmax(-1), rows.argmax(-1, keepdim=True)
    greedy = torch.cat([likeliest, logprobs.gather(-1, likeliest)], -1).tolist()  # in float64
    tokens = list[Token | Exception]()
    for row, row_logprobs, (token, logprob), one in zip(rows, logprobs, greedy, asked, strict=True):
        try:
            tokens.append(_choose(row, row_logprobs, int(token), logprob, *one))
        except Exception as error:
            tokens.append(error)
    return tokens


def _choose(
    logits: Tensor,
    logprobs: Tensor,
    token: int,
    logprob: float,
    params: SamplingParams,
    seed: int,
    position: int,
) -> Token:
    """The next token of one sequence, whose most likely token and its log-probability are known."""
    if math.isnan(logprob):
        raise FloatingPointError("a logit is NaN, or all are infinite")
    if params.top_k != 1 and params.temperature != 0:
        token = _draw(logits, params, _uniform(seed, position))
        logprob = logprobs[token].item()
    top = _top(logprobs, params.top_n_logprobs) if params.top_n_logprobs else ()
    return Token(token, logprob, top)


def _top(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The most likely tokens with their log-probabilities; none that the model excludes (-inf)."""
    top = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return tuple([(token, logprob) for token, logprob in pairs if logprob > -math.inf])


def _draw(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    """The token at which the cumulative probability of the remaining tokens exceeds `uniform` times their sum."""
    # At most 0 before the division, so that with a small temperature scores overflow only to a probability of 0.
    scores = (logits - logits.max()) / params.temperature
    tokens: Tensor | None = None
    if params.top_k or 0 < params.top_p < 1:
        scores, tokens = scores.sort(descending=True, stable=True)
        scores = scores[: min(params.top_k or len(scores), len(scores))]
    probabilities = scores.softmax(0)
    cumulated = probabilities.cumsum(0)
    if 0 < params.top_p < 1:
        cumulated = cumulated[: int((cumulated - probabilities < params.top_p).sum())]
    total = cumulated[-1].item()
    if not 0 < total < math.inf:
        raise FloatingPointError(f"the probabilities at temperature {params.temperature} add up to {total}")
    # Below the sum even after rounding, so that a token with probability 0 is never sampled.
    passed = min(uniform * total, math.nextafter(total, 0))
    place = int(torch.searchsorted(cumulated, passed, right=True))
    return int(tokens[place]) if tokens is not None else place


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def as_numbers(token: Token | Exception, most: int) -> list[float]:
    """A token, or the error in its place, as 2 + 2 * `most` numbers, with space for `most` pairs of `Token.top`."""
    if isinstance(token, Exception):
        return [-1.0 if isinstance(token, FloatingPointError) else -2.0] * (2 + 2 * most)
    pairs = [x for pair in token.top for x in pair]
    return [token.id, token.logprob, *pairs, *[-1.0] * (2 * most - len(pairs))]


def from_numbers(numbers: Sequence[float], top: int) -> Token | str:
    """The token, with the first `top` pairs, or the error."""
    if numbers[0] in _FAULTS:
        return _FAULTS[numbers[0]]
    pairs = zip(numbers[2::2], numbers[3::2], strict=True)
    likeliest = tuple([(int(token), logprob) for token, logprob in pairs if token >= 0])
    return Token(int(numbers[0]), numbers[1], likeliest[:top])
