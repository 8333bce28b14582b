"""The requests that clients may send: the supported part of OpenAI's completions and chat completions."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.inference.tokenizer import Tokenizer

_MOST_SEED = 2**63
_MOST_STRINGS = 1 << 15  # in a body, including field names
_BYTES_OF_A_VALUE = 24  # with more values, a body takes over 10 times the memory of the largest one
_SHOWN = 100  # maximum characters of client input in an error
Zero = Annotated[float, Field(ge=0, le=0)]
PositiveInt = Annotated[int, Field(ge=1)]
Stop = Annotated[StrictStr, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0)]
Tokens = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]  # one error, not one for each wrong token


class Refused(Exception):
    """The request is answered with an error.

    Args:
        status: the HTTP status.
        message: one line.
        kind: OpenAI's type of error.
        param: the invalid field.
        code: OpenAI's code, if there is one.
        headers: additional headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers or {}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def __reduce__(self) -> tuple[Any, ...]:  # it is sent between processes
        return Refused, (self.status, *self.body["error"].values(), self.headers)


@dataclass(frozen=True)
class Limits:
    """The limits of a request.

    Attributes:
        model: the model name in the API.
        length: maximum tokens of a request.
        body_bytes: maximum bytes of a request.
    """

    model: str
    length: int
    body_bytes: int


class _Strict(BaseModel):
    """Unknown fields are rejected, so that a client never believes that they had an effect."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class KvTransferParams(_Strict):
    """What proxies send to an instance that prefills for a decoder. Fields with a single value are vLLM's."""

    do_remote_decode: Literal[True]
    do_remote_prefill: Literal[False] | None = None
    remote_engine_id: None = None
    remote_block_ids: None = None
    remote_host: None = None
    remote_port: None = None


class Body(_Strict):
    """The common fields of both kinds of requests. Fields with a single value exist for clients that send it."""

    said: ClassVar[str]  # the field of the prompts

    model: str
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-_MOST_SEED, lt=_MOST_SEED)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    kv_transfer_params: KvTransferParams | None = None

    @property
    def streams_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def texts(self) -> list[str]:
        """The text to tokenize."""
        raise NotImplementedError

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The tokens of each prompt."""
        raise NotImplementedError

    @property
    def new_tokens(self) -> int | None:
        """The maximum tokens of a text; None: the server's default."""
        raise NotImplementedError

    @property
    def logprobs_returned(self) -> int | None:
        """The number of top log-probabilities per token; None: none at all."""
        raise NotImplementedError


class Completion(Body):
    """The body of POST /v1/completions."""

    said = "prompt"
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=128, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=128, fail_fast=True)]
    )
    max_tokens: PositiveInt | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    def texts(self) -> list[str]:
        return [one for one in self._given() if isinstance(one, str)]

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        return [tokenizer.encode(one) if isinstance(one, str) else one for one in self._given()]

    def _given(self) -> list[Any]:
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens or 16

    @property
    def logprobs_returned(self) -> int | None:
        return self.logprobs


class ContentPart(_Strict):
    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": self.role, "content": "".join(parts)}


class ResponseFormat(_Strict):
    type: Literal["text"]


class Chat(Body):
    """The body of POST /v1/chat/completions."""

    said = "messages"
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    def texts(self) -> list[str]:
        return ["".join(message.plain["content"] for message in self.messages)]

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        return [tokenizer.chat([message.plain for message in self.messages])]

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprobs_returned(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def read(kind: type[Body], data: bytes, tokenizer: Tokenizer, limits: Limits) -> tuple[Body, list[list[int]]]:
    """A request without its prompts, and the tokens of the prompts.

    Raises:
        Refused: it is not JSON, is too large, or has a field that is missing, unknown, or has an invalid type or value.
    """
    _check_size(data, limits)
    body = _parse(kind, data)
    check_model(body.model, limits.model)
    most = limits.length * tokenizer.longest
    if long := [text for text in body.texts() if len(text) > most]:
        raise _too_long(f"{len(long[0])} characters", limits.length)
    try:
        prompts = body.prompts(tokenizer)
    except UsageError as error:
        raise Refused(400, str(error), param=kind.said) from None
    if many := [tokens for tokens in prompts if len(tokens) > limits.length]:
        raise _too_long(f"{len(many[0])} tokens", limits.length)
    return body.model_copy(update={kind.said: None}), prompts


def check_model(given: str, ours: str) -> None:
    """Reject a request for another model."""
    if given != ours:
        why = f"model {given[:_SHOWN]!r}: not found; use {ours!r}"
        raise Refused(404, why, param="model", code="model_not_found")


def _too_long(what: str, length: int) -> Refused:
    why = f"prompt of {what}: more than {length} tokens; give a prompt below {length} tokens"
    return Refused(400, why, param="prompt", code="context_length_exceeded")


def _check_size(data: bytes, limits: Limits) -> None:
    """Reject a body with very many values, which would take much more memory than it has bytes."""
    # Without escapes each quote begins or ends a string.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * _MOST_STRINGS:
        raise Refused(400, f"the body has more than {_MOST_STRINGS} strings; give fewer messages")
    commas = sum(part.count(b",") for part in plain.split(b'"')[::2])
    if commas >= (most := limits.body_bytes // _BYTES_OF_A_VALUE):
        raise Refused(400, f"the body has more than {most} values; give a shorter prompt, or text instead of tokens")


def _parse(kind: type[Body], data: bytes) -> Body:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # For a union of types, the location also has their names: only the field is reported.
        place = " ".join(str(fault["loc"][0])[:_SHOWN].split()) if fault["loc"] else None
        message = fault["msg"] if place is None else f"{place}: {fault['msg']}"
        raise Refused(400, " ".join(message.split()), param=place) from None
