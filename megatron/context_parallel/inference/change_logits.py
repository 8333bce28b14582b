"""Changes logits by the rules of a request, before the next token of its text is chosen."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.context_parallel.kernels.to_device import to_device

from .faults import GrammarFault
from .rules import Rules


@dataclass(frozen=True)
class TextSoFar:
    """What the rules look at.

    Attributes:
        prompt, text: the tokens of the prompt, and of the text so far.
        ends: the end tokens.
        allowed: bool [vocabulary], what the grammar allows next, or why it cannot say; None: everything.
    """

    prompt: Sequence[int]
    text: Sequence[int]
    ends: frozenset[int]
    allowed: Tensor | GrammarFault | None = None


def change_logits(logits: Tensor, rules: Rules, so_far: TextSoFar) -> Tensor:
    """The logits from which the next token is chosen, in the order of vLLM: masks, bias, penalties.

    The host reads nothing of them. If no token is left, all are -inf.

    Args:
        logits: float64 [vocabulary].

    Raises:
        GrammarFault: the grammar cannot say what it allows.
    """
    logits = logits.clone()
    allowed = so_far.allowed
    if isinstance(allowed, GrammarFault):
        raise allowed
    if allowed is not None:
        logits.masked_fill_(~to_device(allowed, logits.device), -math.inf)
    if len(so_far.text) < rules.min_tokens:
        ends = {end for end in so_far.ends if end < len(logits)}  # a tokenizer may have more tokens than the model
        without = logits.index_fill(0, _indices(ends, logits), -math.inf)
        if allowed is not None:  # a text that is complete may always end
            without = torch.where((without > -math.inf).any(), without, logits)
        logits = without
    if rules.logit_bias:
        tokens, bias = zip(*rules.logit_bias, strict=True)
        logits[_indices(tokens, logits)] += _numbers(bias, logits)
    if rules.repetition_penalty != 1.0:
        said = _indices({*so_far.prompt, *so_far.text}, logits)
        old = logits[said]
        new = torch.where(old > 0, old / rules.repetition_penalty, old * rules.repetition_penalty)
        logits[said] = new.clamp_max(torch.finfo(new.dtype).max)  # a tiny penalty makes any number too large
    if rules.presence_penalty or rules.frequency_penalty:
        counts = Counter(so_far.text)
        less = [rules.frequency_penalty * count + rules.presence_penalty for count in counts.values()]
        logits[_indices([*counts], logits)] -= _numbers(less, logits)
    return logits


def _indices(tokens: Sequence[int] | set[int], like: Tensor) -> Tensor:
    given = sorted(tokens) if isinstance(tokens, set) else [*tokens]
    return to_device(torch.tensor(given, dtype=torch.int64), like.device)


def _numbers(given: Sequence[float], like: Tensor) -> Tensor:
    return to_device(torch.tensor(given, dtype=like.dtype), like.device)
