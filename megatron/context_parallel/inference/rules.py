"""What a request changes in the logits before its tokens are chosen, and when its text may end."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .faults import GrammarFault


@dataclass(frozen=True)
class Rules:
    """The rules of a request. The defaults change nothing.

    They depend only on the tokens of the text so far, so neither on other requests nor on the number of ranks.

    Attributes:
        min_tokens: before so many tokens, no end token is chosen and no stop string ends the text.
        ignore_ends: end tokens do not end the text.
        presence_penalty: subtracted from the logit of each token that the text has.
        frequency_penalty: subtracted once for each time that the text has the token.
        repetition_penalty: positive logits of tokens that the prompt or the text has are divided by it, negative ones
            multiplied.
        min_p: tokens whose probability is below this share of the highest one are not chosen.
        logit_bias: pairs of a token and a number that is added to its logit.
        grammar: what the text must follow, in llguidance's form; "": anything.
    """

    min_tokens: int = 0
    ignore_ends: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()
    grammar: str = ""


NO_RULES = Rules()


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

    Args:
        logits: float64 [vocabulary].

    Raises:
        GrammarFault: no token is left.
    """
    logits = logits.clone()
    allowed = so_far.allowed
    if isinstance(allowed, GrammarFault):
        raise allowed
    if allowed is not None:
        logits.masked_fill_(~allowed.to(logits.device), -math.inf)
    if len(so_far.text) < rules.min_tokens:
        without = logits.clone()
        without[_indices(so_far.ends, logits)] = -math.inf
        if allowed is None or (without > -math.inf).any():  # a text that is complete may always end
            logits = without
    if rules.logit_bias:
        tokens, bias = zip(*rules.logit_bias, strict=True)
        logits[_indices(tokens, logits)] += torch.tensor(bias, dtype=logits.dtype, device=logits.device)
    if rules.repetition_penalty != 1.0:
        said = _indices({*so_far.prompt, *so_far.text}, logits)
        old = logits[said]
        logits[said] = torch.where(old > 0, old / rules.repetition_penalty, old * rules.repetition_penalty)
    if rules.presence_penalty or rules.frequency_penalty:
        counts = torch.bincount(_indices(so_far.text, logits), minlength=len(logits)).to(logits.dtype)
        logits -= rules.frequency_penalty * counts + rules.presence_penalty * (counts > 0)
    if not (logits != -math.inf).any():
        raise GrammarFault
    return logits


def _indices(tokens: Sequence[int] | set[int] | frozenset[int], like: Tensor) -> Tensor:
    return torch.tensor(sorted(tokens) if isinstance(tokens, set | frozenset) else [*tokens], device=like.device).long()
