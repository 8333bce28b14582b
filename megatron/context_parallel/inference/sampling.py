"""The next tokens of sequences from their logits: the most likely one, or one drawn by temperature, top-k and top-p."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.inference.sampling_params import SamplingParams
from torch import Tensor


@dataclass(frozen=True)
class Token:
    """A token that was chosen.

    Attributes:
        id: the token.
        logprob: the natural logarithm of its probability by the model, before temperature, top-k and top-p.
        top: the most likely tokens, with the same of each, in descending order.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def choose_tokens(logits: Sequence[Tensor], asked: Sequence[tuple[SamplingParams, int, int]]) -> list[Token | None]:
    """The next token of each of some sequences; None where a logit is NaN or all are infinite.

    A draw depends on its seed and position alone: not on the number of ranks, nor on other sequences.

    Args:
        logits: of each sequence [vocabulary], of the row before; float32 or another floating dtype.
        asked: of each sequence the parameters, the seed, any integer, and the position of the new token, from 0. Of
            megatron-core's parameters, `top_k` 1 or `temperature` 0 takes the most likely token, the first of equals;
            `top_k` 0 and `top_p` 0 or 1 leave those out; `top_n_logprobs` is how many `Token.top` has.
    """
    rows = torch.stack([*logits]).to("cpu", torch.float64)
    logprobs, likeliest = rows.log_softmax(-1), rows.argmax(-1, keepdim=True)
    greedy = torch.cat([likeliest, logprobs.gather(-1, likeliest)], -1).tolist()  # in float64
    tokens = list[Token | None]()
    for i, ((params, seed, position), (token, logprob)) in enumerate(zip(asked, greedy, strict=True)):
        if math.isnan(logprob):
            tokens.append(None)
            continue
        if params.top_k != 1 and params.temperature != 0:
            token = _draw(rows[i], params, _uniform(seed, position))
            logprob = logprobs[i, token].item()
        top = _top(logprobs[i], params.top_n_logprobs) if params.top_n_logprobs else ()
        tokens.append(Token(int(token), logprob, top))
    return tokens


def _top(logprobs: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    top = logprobs.topk(min(count, len(logprobs)))
    return tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def _draw(logits: Tensor, params: SamplingParams, uniform: float) -> int:
    """The token at which the cumulated probability of those that are left passes `uniform` of their sum."""
    scores, tokens = logits / params.temperature, None
    if params.top_k or 0 < params.top_p < 1:
        scores, tokens = scores.sort(descending=True, stable=True)
        scores = scores[: params.top_k or None]
    probabilities = scores.softmax(0)
    cumulated = probabilities.cumsum(0)
    if 0 < params.top_p < 1:
        cumulated = cumulated[: int((cumulated - probabilities < params.top_p).sum())]
    place = int(torch.searchsorted(cumulated, uniform * cumulated[-1], right=True))
    return int(tokens[place]) if tokens is not None else place


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53
