"""The requests that clients may send: OpenAI's completions and chat completions with vLLM's additions."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictStr, ValidationError
from pydantic_core import ErrorDetails, from_json

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.inference.rules import Rules
from megatron.context_parallel.inference.tokenizer import Tokenizer

from .fields import refusal_of, shown
from .messages import ChatMessage, ChosenTool, Strict, Tool
from .structured import Structured, check_grammar, schema_grammar
from .tool_calls import CallReader, schema_of_arguments, schema_of_calls

_MOST_SEED = 2**63
_MOST_STRINGS = 1 << 15  # in a body, including field names
_BYTES_OF_A_VALUE = 24  # with more values, a body takes over 10 times the memory of the largest one
_SHOWN = 100  # maximum characters of client input in an error
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


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class KvTransferParams(Strict):
    """What proxies send to an instance that prefills for a decoder. Fields with a single value are vLLM's."""

    do_remote_decode: Literal[True]
    do_remote_prefill: Literal[False] | None = None
    remote_engine_id: None = None
    remote_block_ids: None = None
    remote_host: None = None
    remote_port: None = None


class Body(Structured):
    """The common fields of both kinds of requests; null is the same as no field. Errors quote the descriptions."""

    said: ClassVar[str]  # the field of the prompts

    model: str = Field(description="the name that /v1/models returns")
    temperature: float | None = Field(None, ge=0, description="a number from 0 up")
    top_p: float | None = Field(None, gt=0, le=1, description="a number above 0 and up to 1")
    top_k: int | None = Field(None, ge=-1, description="an integer from 1 up; 0 or -1 for all tokens")
    min_p: float | None = Field(None, ge=0, le=1, description="a number from 0 to 1")
    n: int | None = Field(None, ge=1, le=128, description="an integer from 1 to 128")
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = Field(
        None, description="a text, or a list of up to 16; each of 1 to at most 1000 characters"
    )
    seed: int | None = Field(None, ge=-_MOST_SEED, lt=_MOST_SEED, description="an integer of 64 bits")
    stream: bool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(None, description='an object with "include_usage": true or false')
    min_tokens: int | None = Field(None, ge=0, description="an integer from 0 to max_tokens")
    ignore_eos: bool | None = Field(None, description="true or false")
    return_token_ids: bool | None = Field(None, description="true or false")
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="a number from -2 to 2")
    frequency_penalty: float | None = Field(None, ge=-2, le=2, description="a number from -2 to 2")
    repetition_penalty: float | None = Field(None, gt=0, description="a number above 0; 1 for none")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, description="an object from tokens (numbers as text) to numbers from -100 to 100"
    )
    kv_transfer_params: KvTransferParams | None = Field(
        None, description="what a proxy sends to have a prompt prefilled for a decoder"
    )

    @property
    def streams_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def rules(self) -> Rules:
        """What changes the logits, and when the text may end.

        Raises:
            UsageError: the fields contradict each other.
        """
        return Rules(
            min_tokens=self.min_tokens or 0,
            ignore_ends=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            min_p=self.min_p or 0.0,
            logit_bias=_biases(self.logit_bias or {}),
            grammar="" if self.kv_transfer_params else self.grammar(),
        )

    def grammar(self) -> str:
        """What the text must follow; "": anything.

        Raises:
            UsageError: a grammar cannot be read, or there are several.
        """
        try:
            found = self.grammars()
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(f"{' '.join(str(error).split())[:200]}; correct it") from None
        if len(found) > 1:
            raise UsageError(f"{len(found)} fields say what the text looks like; give one of them")
        return "".join(found)

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

    @property
    def echoes(self) -> bool:
        """Whether the answer begins with the prompt."""
        return False


def _biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if wrong := [token for token in given if not re.fullmatch("0|[1-9][0-9]{0,8}", token)]:  # each token once
        raise UsageError(f"logit_bias: {wrong[0][:_SHOWN]!r} is no token; give numbers as text")
    return tuple([(int(token), bias) for token, bias in given.items()])


class Completion(Body):
    """The body of POST /v1/completions."""

    said = "prompt"
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=128, fail_fast=True)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=128, fail_fast=True)]
    ) = Field(
        description="a text, a list of tokens, or a list of up to 128 texts or lists of tokens; none of them empty"
    )
    max_tokens: int | None = Field(None, ge=0, description="an integer from 0 up")
    logprobs: int | None = Field(None, ge=0, le=20, description="an integer from 0 to 20")
    echo: bool | None = Field(None, description="true or false")

    def texts(self) -> list[str]:
        return [one for one in self._given() if isinstance(one, str)]

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        return [tokenizer.encode(one) if isinstance(one, str) else one for one in self._given()]

    def _given(self) -> list[Any]:
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given

    @property
    def new_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def logprobs_returned(self) -> int | None:
        return self.logprobs

    @property
    def echoes(self) -> bool:
        return bool(self.echo)


class Chat(Body):
    """The body of POST /v1/chat/completions."""

    said = "messages"
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] = Field(
        description="a list of objects with a role (system, developer, user, assistant, tool) and a content of text, "
        "or parts of text; an assistant may have tool_calls instead"
    )
    max_tokens: int | None = Field(None, ge=1, description="an integer from 1 up")
    max_completion_tokens: int | None = Field(None, ge=1, description="an integer from 1 up")
    logprobs: bool | None = Field(None, description="true or false")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="an integer from 0 to 20, with logprobs true")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="an object with variables of the template")
    tools: list[Tool] | None = Field(
        None, description='a list of objects with type "function" and a function with name and parameters'
    )
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = Field(
        None, description='"none", "auto", "required", or {"type": "function", "function": {"name": ...}}'
    )
    parallel_tool_calls: bool | None = Field(None, description="true or false")
    echo: Literal[False] | None = Field(None, description="false, or use /v1/completions")

    def texts(self) -> list[str]:
        return ["".join([message.text for message in self.messages])]

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        options = dict(self.chat_template_kwargs or {})
        if self.top_logprobs and not self.logprobs:
            raise UsageError("top_logprobs: needs logprobs; give true")
        if self.callable_tools:
            options["tools"] = [tool.model_dump(exclude_none=True) for tool in self.callable_tools]
        return [tokenizer.chat([message.plain for message in self.messages], **options)]

    @property
    def callable_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools or []

    def call_reader(self) -> CallReader | None:
        """What finds calls of tools in a text; None: there are no tools."""
        if not self.callable_tools:
            return None
        names = [tool.function.name for tool in self.callable_tools]
        forced = self.tool_choice.function.name if isinstance(self.tool_choice, ChosenTool) else None
        return CallReader(names, forced, self.tool_choice == "required")

    def grammar(self) -> str:
        calls = self._grammar_of_calls()
        given = super().grammar()
        if calls and given:
            raise UsageError("tool_choice and another field say what the text looks like; give one of them")
        return calls or given

    def _grammar_of_calls(self) -> str:
        if self.tool_choice in (None, "none", "auto"):
            if self.callable_tools and self.parallel_tool_calls is False:
                raise UsageError('parallel_tool_calls: false needs a tool_choice other than "auto"; give "required"')
            return ""
        tools = self.tools or []
        if isinstance(self.tool_choice, ChosenTool):
            name = self.tool_choice.function.name
            chosen = [tool for tool in tools if tool.function.name == name]
            if not chosen:
                raise UsageError(f"tool_choice: {name[:_SHOWN]!r} is not in tools; give one of them")
            return schema_grammar(schema_of_arguments(chosen[0]))
        if not tools:
            raise UsageError('tool_choice: "required" needs tools; give them')
        return schema_grammar(schema_of_calls(tools, 1 if self.parallel_tool_calls is False else None))

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def logprobs_returned(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class Tokenize(Strict):
    """The body of POST /tokenize, vLLM's: a prompt or messages."""

    said: ClassVar[str] = "prompt"
    model: str | None = Field(None, description="the name that /v1/models returns")
    prompt: str | None = Field(None, description="a text")
    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)] | None = Field(
        None, description="a list of messages as in /v1/chat/completions"
    )
    tools: list[Tool] | None = Field(None, description="a list of tools as in /v1/chat/completions")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="an object with variables of the template")
    return_token_strs: bool | None = Field(None, description="true or false")
    add_special_tokens: bool | None = Field(None, description="true or false")

    def texts(self) -> list[str]:
        return [self.prompt or "", *[message.text for message in self.messages or ()]]

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        if (self.prompt is None) == (self.messages is None):
            raise UsageError("prompt: give it, or messages")
        if self.prompt is not None:
            return [tokenizer.encode(self.prompt, special=self.add_special_tokens)]
        if self.add_special_tokens:
            raise UsageError("add_special_tokens: the chat template writes them; leave it out")
        options = dict(self.chat_template_kwargs or {})
        if self.tools:
            options["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return [tokenizer.chat([message.plain for message in self.messages or ()], **options)]


class Detokenize(Strict):
    """The body of POST /detokenize, vLLM's."""

    said: ClassVar[str] = "tokens"
    model: str | None = Field(None, description="the name that /v1/models returns")
    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = Field(description="a list of tokens")

    def texts(self) -> list[str]:
        return []

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        return [self.tokens]


AnyBody = Body | Tokenize | Detokenize


def read(kind: type[AnyBody], data: bytes, tokenizer: Tokenizer, limits: Limits) -> tuple[AnyBody, list[list[int]]]:
    """A request without its prompts, and the tokens of the prompts.

    Raises:
        Refused: it is not JSON, is too large, or has a field that is missing, unknown, or has an invalid type or value.
    """
    _check_size(data, limits)
    body = _parse(kind, data)
    if body.model is not None:
        check_model(body.model, limits.model)
    most = limits.length * tokenizer.longest
    if long := [text for text in body.texts() if len(text) > most]:
        raise _too_long(f"{len(long[0])} characters", limits.length)
    try:
        if isinstance(body, Body) and (grammar := body.rules.grammar):
            check_grammar(grammar)
        prompts = body.prompts(tokenizer)
    except UsageError as error:
        field = str(error).partition(":")[0]
        raise Refused(400, str(error), param=field if field in kind.model_fields else kind.said) from None
    if isinstance(body, Body) and (many := [tokens for tokens in prompts if len(tokens) > limits.length]):
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


def _parse(kind: type[AnyBody], data: bytes) -> AnyBody:
    try:
        given = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(400, f"the body is not JSON ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(given, dict):
        raise Refused(400, "the body is not an object; send {...}")
    fields = {name: value for name, value in given.items() if value is not None}
    for name in [name for name in fields if name not in kind.model_fields]:
        if why := refusal_of(name, fields.pop(name)):
            raise _wrong(name, why)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        place, missing = _wrong_place(fields, faults)
        name = str(faults[0]["loc"][0])
        what = "missing" if missing else f"{shown(_value(fields, place))}not supported"
        raise _wrong(name, f"{what}; give {kind.model_fields[name].description}", _named(place)) from None


def _wrong_place(fields: dict[str, Any], faults: Sequence[ErrorDetails]) -> tuple[Sequence[str | int], bool]:
    """The steps to the value that is wrong, and whether it is missing.

    Of a field of several types, pydantic has the faults of all. A value of a wrong kind is a fault of most of them, so
    another fault says more, and a deeper one more than the one around it.
    """
    telling = [fault for fault in faults if not fault["type"].endswith("_type")]
    found = [(_place(fields, fault["loc"]), fault) for fault in telling or faults]
    place, fault = max(found, key=lambda one: len(one[0]))
    if not telling and len(faults) > 1:
        return place[:1], False
    missing = fault["type"] == "missing"
    return [*place, fault["loc"][-1]] if missing else place, missing


def _place(given: Any, steps: Sequence[str | int]) -> list[str | int]:
    """The steps without pydantic's names of types between them."""
    place = list[str | int]()
    for step in steps:
        if step in given if isinstance(given, dict) else isinstance(given, list) and isinstance(step, int):
            place.append(step)
            given = given[step]
    return place


def _value(given: Any, place: Sequence[str | int]) -> Any:
    for step in place:
        given = given[step]
    return given


def _named(place: Sequence[str | int]) -> str:
    """As `messages[0].role`."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{' '.join(step[:_SHOWN].split())}" for step in place]
    return "".join(steps).removeprefix(".")


def _wrong(name: str, why: str, place: str = "") -> Refused:
    field = " ".join(name[:_SHOWN].split())
    return Refused(400, f"{place or field}: {why}", param=field)
