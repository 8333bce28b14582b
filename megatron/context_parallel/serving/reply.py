"""The answers to clients: texts with log-probabilities and counts, whole or in chunks."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.context_parallel.inference.engine import Request, RequestOutput
from megatron.context_parallel.inference.sampling import Token

Decode = Callable[[list[int]], str]


@dataclass
class Texts:
    """The texts of one HTTP request, as they are generated.

    Attributes:
        name: the id of the HTTP request.
        model: the model name in the API.
        requests: the engine's requests, one for each text.
        n: texts per prompt.
        logprobs: whether log-probabilities are included.
    """

    name: str
    model: str
    requests: list[Request]
    n: int
    logprobs: bool
    decode: Decode
    created: int = field(default_factory=lambda: int(time.time()))
    reused: int = 0
    generated: int = 0

    def __post_init__(self) -> None:
        self.index = {request.name: i for i, request in enumerate(self.requests)}
        self.outputs: list[list[RequestOutput]] = [[] for _ in self.requests]
        self.offsets = [0] * len(self.requests)

    def add(self, output: RequestOutput) -> int:
        """Record an output. Returns the text that it belongs to."""
        self.outputs[self.index[output.request]].append(output)
        self.reused += output.reused
        self.generated += len(output.tokens)
        return self.index[output.request]

    @property
    def unfinished(self) -> list[str]:
        """The names of the requests whose texts are still running."""
        pairs = zip(self.requests, self.outputs, strict=True)
        return [request.name for request, outputs in pairs if not (outputs and outputs[-1].finish)]

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens of all prompts, each counted once, and of all texts."""
        prompt = sum(len(request.tokens) for request in self.requests) // self.n
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.generated,
            "total_tokens": prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": min(self.reused, prompt)},
        }

    def whole(self) -> dict[str, Any]:
        """The answer, when all texts are complete."""
        raise NotImplementedError

    def first(self) -> list[dict[str, Any]]:
        """The chunks before any text."""
        raise NotImplementedError

    def chunk(self, i: int, output: RequestOutput) -> dict[str, Any]:
        """The chunk with an output of text i."""
        raise NotImplementedError

    def last(self) -> dict[str, Any]:
        """The chunk with the counts."""
        raise NotImplementedError

    def _envelope(self, kind: str, choices: list[dict], **more: Any) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        } | more


class Completions(Texts):
    """Answers of /v1/completions."""

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(i, outputs) for i, outputs in enumerate(self.outputs)]
        return self._envelope("text_completion", choices, usage=self.usage)

    def first(self) -> list[dict[str, Any]]:
        return []

    def chunk(self, i: int, output: RequestOutput) -> dict[str, Any]:
        return self._envelope("text_completion", [self._choice(i, [output])])

    def last(self) -> dict[str, Any]:
        return self._envelope("text_completion", [], usage=self.usage)

    def _choice(self, i: int, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        return {
            "index": i,
            "text": "".join(output.text for output in outputs),
            "logprobs": self._logprobs(i, [token for output in outputs for token in output.tokens]),
            "finish_reason": outputs[-1].finish or None,
        }

    def _logprobs(self, i: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        texts = [self.decode([token.id]) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self.offsets[i])
            self.offsets[i] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float]:
        return {self.decode([other]): logprob for other, logprob in token.top or [(token.id, token.logprob)]}


class Chats(Texts):
    """Answers of /v1/chat/completions."""

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(i, outputs) for i, outputs in enumerate(self.outputs)]
        return self._envelope("chat.completion", choices, usage=self.usage)

    def first(self) -> list[dict[str, Any]]:
        return [self._chunk(i, {"role": "assistant", "content": ""}) for i in range(len(self.requests))]

    def chunk(self, i: int, output: RequestOutput) -> dict[str, Any]:
        delta = {"content": output.text} if output.text or not output.finish else {}
        return self._chunk(i, delta, self._logprobs(output.tokens), output.finish or None)

    def last(self) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", [], usage=self.usage)

    def _choice(self, i: int, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        text = "".join(output.text for output in outputs)
        return {
            "index": i,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs([token for output in outputs for token in output.tokens]),
            "finish_reason": outputs[-1].finish,
        }

    def _chunk(self, i: int, delta: dict, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
        choice = {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return self._envelope("chat.completion.chunk", [choice])

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {"content": [{**self._one(t.id, t.logprob), "top_logprobs": self._others(t)} for t in tokens]}

    def _others(self, token: Token) -> list[dict[str, Any]]:
        return [self._one(other, logprob) for other, logprob in token.top]

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token])
        return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}
