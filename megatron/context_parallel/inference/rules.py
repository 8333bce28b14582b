"""What a request changes in the logits before its tokens are chosen, and when its text may end."""

from collections.abc import Sequence
from dataclasses import dataclass


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

    def keep_logits(self, tokens: int) -> bool:
        """Whether they do not change the logits of the token that follows a text of so many tokens."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        return not (tokens < self.min_tokens or penalties or self.logit_bias or self.grammar)


NO_RULES = Rules()
