"""The next token of a sequence from its logits: the most likely one, or one drawn by temperature, top-k and top-p."""

import hashlib
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


def choose_token(logits: Tensor, params: SamplingParams, seed: int, position: int) -> Token:
    """The token at `position` of a sequence.

    The draw depends on `seed` and `position` alone: not on the number of ranks, nor on other sequences.

    Args:
        logits: [vocabulary], of the row before; float32 or another floating dtype.
        params: megatron-core's. `top_k` 1 or `temperature` 0 takes the most likely token, the first of equals. `top_k`
            0 and `top_p` 0 or 1 leave those out. `top_n_logprobs` is how many `Token.top` has.
        seed: of the request, any integer.
        position: of the new token, from 0.

    Raises:
        FloatingPointError: a logit is NaN.
    """
    if logits.isnan().any():
        raise FloatingPointError(f"a logit at position {position - 1} is NaN")
    logits = logits.to("cpu", torch.float64)
    greedy = params.top_k == 1 or params.temperature == 0
    token = int(logits.argmax()) if greedy else _draw(logits, params, _uniform(seed, position))
    logprobs = logits.log_softmax(0)
    top = logprobs.topk(min(params.top_n_logprobs, len(logprobs)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return Token(token, logprobs[token].item(), tuple(pairs))


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
