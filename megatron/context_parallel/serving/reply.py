"""The answers to clients: texts with log-probabilities, calls of tools and counts, whole or in chunks."""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.context_parallel.inference.request import Request, RequestOutput
from megatron.context_parallel.inference.sampling import Token

from .token_texts import Offsets, TokenTexts
from .tool_calls import Call, CallReader

Decode = Callable[[list[int]], str]
_LEAST = -9999.0  # instead of minus infinity, which JSON does not have


@dataclass
class Texts:
    """The texts of one HTTP request, as they are generated.

    Attributes:
        name: the id of the HTTP request.
        model: the model name in the API.
        requests: the engine's requests, one for each text.
        n: texts per prompt.
        logprobs: whether log-probabilities are included.
        decode: makes text of tokens.
        token_texts: makes text of single tokens.
        echo: whether texts begin with their prompts.
        token_ids: whether the tokens of prompts and texts are included, as with vLLM.
        calls: finds calls of tools; None: there are no tools.
    """

    name: str
    model: str
    requests: list[Request]
    n: int
    logprobs: bool
    decode: Decode
    token_texts: TokenTexts
    echo: bool = False
    token_ids: bool = False
    calls: CallReader | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    generated: int = 0

    def __post_init__(self) -> None:
        self.index = {request.name: i for i, request in enumerate(self.requests)}
        self.outputs: list[list[RequestOutput]] = [[] for _ in self.requests]
        self.offsets = [Offsets() for _ in self.requests]
        self.readers = [copy.copy(self.calls) for _ in self.requests]
        self.reused = [0] * len(self.requests)  # prompt tokens of each text that were in the cache

    def add(self, output: RequestOutput) -> int:
        """Record an output. Returns the text that it belongs to."""
        i = self.index[output.request]
        self.outputs[i].append(output)
        self.reused[i] += output.reused
        self.generated += len(output.tokens)
        return i

    @property
    def unfinished(self) -> list[str]:
        """The names of the requests whose texts are still running."""
        pairs = zip(self.requests, self.outputs, strict=True)
        return [request.name for request, outputs in pairs if not (outputs and outputs[-1].finish)]

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens of all prompts, each counted once, and of all texts. No text computed the cached ones."""
        prompt = sum(len(request.tokens) for request in self.requests) // self.n
        cached = sum(min(self.reused[first : first + self.n]) for first in range(0, len(self.requests), self.n))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self.generated,
            "total_tokens": prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": cached},
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

    def _ids(self, outputs: Sequence[RequestOutput]) -> dict[str, list[int]]:
        """The tokens of outputs, if they are wanted."""
        return {"token_ids": [token.id for output in outputs for token in output.tokens]} if self.token_ids else {}

    def _prompt_ids(self, i: int) -> dict[str, list[int]]:
        """The tokens of the prompt of text i, if they are wanted."""
        return {"prompt_token_ids": [*self.requests[i].tokens]} if self.token_ids else {}

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
        text = "".join([output.text for output in outputs])
        echoed = self.decode([*self.requests[i].tokens]) if self.echo and outputs[0].first else None
        choice = {
            "index": i,
            "text": text if echoed is None else echoed + text,
            "logprobs": self._logprobs(i, outputs, echoed),
            "finish_reason": outputs[-1].finish or None,
        }
        prompt = self._prompt_ids(i) if outputs[0].first else {}
        return choice | prompt | self._ids(outputs)

    def _logprobs(self, i: int, outputs: Sequence[RequestOutput], echoed: str | None) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        tokens = list[Token | None]()
        if echoed is not None:
            tokens.append(None)  # nothing predicts the first token of a prompt
            pieces = b"".join([self.token_texts.piece(token) for token in self.requests[i].tokens])
            missing = len(pieces.decode(errors="replace")) - len(echoed)  # some tokenizers drop a text's first space
            self.offsets[i] = Offsets(max(0, missing))
        for output in outputs:
            tokens += [*output.prompt, *output.tokens]
        ids = [token.id if token else self.requests[i].tokens[0] for token in tokens]
        return {
            "tokens": [self.token_texts.text(token) for token in ids],
            "token_logprobs": [max(token.logprob, _LEAST) if token else None for token in tokens],
            "top_logprobs": [self._top(token) if token else None for token in tokens],
            "text_offset": [self.offsets[i].of(self.token_texts.piece(token)) for token in ids],
        }

    def _top(self, token: Token) -> dict[str, float]:
        """The likeliest tokens, and the chosen one if it is not among them, as with OpenAI."""
        own = () if token.id in dict(token.top) else [(token.id, max(token.logprob, _LEAST))]
        return self.token_texts.by_text([*token.top, *own])


class Chats(Texts):
    """Answers of /v1/chat/completions."""

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(i, outputs) for i, outputs in enumerate(self.outputs)]
        return self._envelope("chat.completion", choices, usage=self.usage, **self._prompt_ids(0))

    def first(self) -> list[dict[str, Any]]:
        begin = {"role": "assistant", "content": ""}
        return [self._chunk(i, begin) | self._prompt_ids(i) for i in range(len(self.requests))]

    def chunk(self, i: int, output: RequestOutput) -> dict[str, Any]:
        logprobs, finish = self._logprobs(output.tokens), output.finish
        if reader := self.readers[i]:
            text, calls = reader.push(output.text), list[Call]()
            if finish:
                rest, calls = reader.finish()
                text += rest
            finish = self._finish(finish, calls)
            delta: dict[str, Any] = {"content": text} if text or not finish else {}
            if calls:
                delta["tool_calls"] = [call.plain(index) for index, call in enumerate(calls)]
        else:
            delta = {"content": output.text} if output.text or not finish else {}
        return self._chunk(i, delta, logprobs, finish or None, **self._ids([output]))

    def last(self) -> dict[str, Any]:
        return self._envelope("chat.completion.chunk", [], usage=self.usage)

    def _choice(self, i: int, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        text = "".join([output.text for output in outputs])
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        finish = outputs[-1].finish
        if reader := self.readers[i]:
            content = reader.push(text)
            rest, calls = reader.finish()
            finish = self._finish(finish, calls)
            if calls:
                message |= {"content": content + rest or None, "tool_calls": [call.plain() for call in calls]}
        return {
            "index": i,
            "message": message,
            "logprobs": self._logprobs([token for output in outputs for token in output.tokens]),
            "finish_reason": finish,
        } | self._ids(outputs)

    def _finish(self, finish: str, calls: Sequence[Call]) -> str:
        """How a text with calls has ended. A tool that the client named is no reason of the model, as with OpenAI."""
        demanded = self.calls is not None and self.calls.forced is not None
        return "tool_calls" if calls and finish == "stop" and not demanded else finish

    def _chunk(
        self, i: int, delta: dict, logprobs: Any = None, finish: str | None = None, **ids: list[int]
    ) -> dict[str, Any]:
        choice = {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **ids}
        return self._envelope("chat.completion.chunk", [choice])

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {"content": [{**self._one(t.id, t.logprob), "top_logprobs": self._others(t)} for t in tokens]}

    def _others(self, token: Token) -> list[dict[str, Any]]:
        return [self._one(other, logprob) for other, logprob in token.top]

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.token_texts.piece(token)
        return {
            "token": self.token_texts.text(token),
            "logprob": max(logprob, _LEAST),
            "bytes": [*piece] if piece else None,
        }
