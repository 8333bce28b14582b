"""What an engine is asked for, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.inference.sampling_params import SamplingParams

from .rules import NO_RULES, Rules
from .sampling import Token


@dataclass(frozen=True)
class Request:
    """A text to generate.

    Attributes:
        name: the unique name of the request.
        tokens: the prompt.
        params: megatron-core's sampling parameters. `temperature`, `top_k`, `top_p`, `num_tokens_to_generate`,
            `top_n_logprobs` and `stop_words` are used. With 0 tokens to generate, the prompt is only computed.
        rules: what changes the logits, and when the text may end.
        scored: whether the first output has the log-probabilities of the prompt's tokens; nothing cached is used then.
        seed: the random seed.
        key: requests with the same key share the cache of common prefixes.
        twin: an earlier request with the same prompt and key, by name; this one starts when that prompt is computed.
        handoff: if given, the prompt is only prefilled, and stays in the cache under this name until `release`.
    """

    name: str
    tokens: Sequence[int]
    params: SamplingParams
    seed: int = 0
    key: str = ""
    twin: str = ""
    handoff: str = ""
    rules: Rules = NO_RULES
    scored: bool = False

    @property
    def end(self) -> int:
        """The maximum number of its tokens in the cache: the last generated token is never cached."""
        return len(self.tokens) + max(self.params.num_tokens_to_generate, 1) - 1


@dataclass(frozen=True)
class RequestOutput:
    """The output of one step for a request.

    Attributes:
        request: the name of the request.
        tokens: the new token, if any.
        text: the text that has become final.
        finish: "" while it runs; "stop" (an end token or a stop string), "length" (the requested number of tokens; a
            handoff has none, and ends when its prefill begins), "cancelled", or "error".
        first: whether it has the first token.
        reused: with the first token, the number of prompt tokens that were already in the cache.
        prompt: in the first output of a scored request, the tokens of the prompt after its first one.
        why: the message of an error, for the client.
    """

    request: str
    tokens: tuple[Token, ...] = ()
    text: str = ""
    finish: str = ""
    first: bool = False
    reused: int = 0
    why: str = ""
    prompt: tuple[Token, ...] = ()
