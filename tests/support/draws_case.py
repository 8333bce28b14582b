"""Draws of tokens by sampling parameters, and the probabilities that they should have."""

import math
from collections import Counter

import torch
from megatron.core.inference.sampling_params import SamplingParams

from megatron.context_parallel.inference.sampling import Draw, Token, choose_tokens

LOGITS = torch.tensor([0.0, 1.0, 3.0, 2.0, -math.inf])
FIRST, SECOND = LOGITS[2:4].softmax(0).tolist()
# Sampling parameters, and the probability of each token that can be drawn. The likeliest token has 0.64 and the next
# 0.24: a top_p of 0.63 needs one of them, 0.65 two.
CASES = (
    ({}, dict(enumerate(LOGITS.softmax(0).tolist()[:4]))),
    ({"temperature": 2.0}, dict(enumerate((LOGITS / 2).softmax(0).tolist()[:4]))),
    ({"top_k": 2}, {2: FIRST, 3: SECOND}),
    ({"top_p": 0.63}, {2: 1.0}),
    ({"top_p": 0.65}, {2: FIRST, 3: SECOND}),
)


def choose_token(logits: torch.Tensor, params: SamplingParams, seed: int, position: int) -> Token | None:
    return choose_tokens([logits], [Draw(params, seed, position)])[0]


def shares(count: int, seed: int, **params: float) -> dict[int, float]:
    """How often each token is drawn at `count` positions."""
    draws = Counter(choose_token(LOGITS, SamplingParams(**params), seed, at).id for at in range(count))
    return {token: drawn / count for token, drawn in draws.items()}
