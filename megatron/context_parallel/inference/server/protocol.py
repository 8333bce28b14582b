"""What a client may send: OpenAI's completions and chat completions, as far as they are computed here."""

import secrets
from typing import Annotated, Any, Literal

from megatron.core.inference.sampling_params import SamplingParams
from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from ...errors import UsageError
from ..engine import Engine, Request
from ..tokenizer import Tokenizer

_MOST_SEED = 2**63
Zero = Annotated[float, Field(ge=0, le=0)]
Count = Annotated[int, Field(ge=1)]
Text = Annotated[StrictStr, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]


class Refused(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        message: one line.
        kind: OpenAI's type of error.
        param: the field at fault.
        code: OpenAI's code, where there is one.
        headers: of the answer.
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
        self.status, self.headers = status, headers or {}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _Strict(BaseModel):
    """Unknown fields are refused: a client must not think that they had an effect."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Body(_Strict):
    """What both kinds of requests have. What has one value only is there for clients that send it."""

    model: str
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] | None = None
    seed: Annotated[int, Field(ge=-_MOST_SEED, lt=_MOST_SEED)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None

    @property
    def streams_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """The tokens of each prompt."""
        raise NotImplementedError

    @property
    def new_tokens(self) -> int | None:
        """The most tokens of a text; None: as the server likes."""
        raise NotImplementedError

    @property
    def told(self) -> int | None:
        """How many log-probabilities are told of each place; None: not even that of the token."""
        raise NotImplementedError

    def requests(self, name: str, key: str, engine: Engine, new: int) -> list[Request]:
        """A request for each text: `n` for each prompt.

        Args:
            name: of all together.
            key: of the client.
            engine: that will run them.
            new: the most tokens of a text, if the body does not limit them.

        Raises:
            Refused: a prompt that can never run.
        """
        found, seed = list[Request](), secrets.randbits(62) if self.seed is None else self.seed
        for tokens in self.prompts(engine.tokenizer):
            params = self._params(self.new_tokens or max(1, min(new, engine.length - len(tokens))))
            try:
                engine.check(tokens, params.num_tokens_to_generate)
            except UsageError as error:
                raise Refused(400, str(error), param="prompt", code="context_length_exceeded") from None
            for _ in range(self.n or 1):
                found.append(Request(f"{name}-{len(found)}", tokens, params, seed + len(found), key))
        return found

    def _params(self, new: int) -> SamplingParams:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=self.top_p or 0.0,
            return_log_probs=self.told is not None,
            top_n_logprobs=self.told or 0,
            num_tokens_to_generate=new,
            stop_words=stop,
        )


class Completion(Body):
    """The body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=128)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=128)]
    )
    max_tokens: Count | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        given: Any = self.prompt
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        return [tokenizer.encode(one) if isinstance(one, str) else one for one in given]

    @property
    def new_tokens(self) -> int | None:
        return self.max_tokens or 16

    @property
    def told(self) -> int | None:
        return self.logprobs


class Part(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[Part], Field(min_length=1)]
    name: str | None = None

    @property
    def plain(self) -> dict[str, str]:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": self.role, "content": "".join(parts)}


class ResponseFormat(_Strict):
    type: Literal["text"]


class Chat(Body):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        try:
            return [tokenizer.chat([message.plain for message in self.messages])]
        except UsageError as error:
            raise Refused(400, str(error), param="messages") from None

    @property
    def new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def told(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def parse(kind: type[Body], body: bytes) -> Body:
    """The body of a request.

    Raises:
        Refused: it is no JSON, or has a field that is missing, unknown, or of another type or range.
    """
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        fault = error.errors()[0]
        # Of a union of types, the place has their names too: the field alone is told.
        place = str(fault["loc"][0]) if fault["loc"] else None
        message = fault["msg"] if place is None else f"{place}: {fault['msg']}"
        raise Refused(400, " ".join(message.split()), param=place) from None
