"""The messages of a chat, and the tools that the model may call."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Strict(BaseModel):
    """Unknown fields are rejected, so that a client never believes that they had an effect."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ContentPart(Strict):
    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    """A call in an earlier answer, as clients send it back."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def plain(self) -> dict[str, Any]:
        """As templates expect it: the arguments are an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            arguments = self.function.arguments
        return {"id": self.id, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class ChatMessage(Strict):
    """A message. Fields with a single value exist for clients that send an answer back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[ContentPart], Field(min_length=1, fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    reasoning: None = None
    reasoning_content: None = None

    @model_validator(mode="after")
    def _has_content(self) -> "ChatMessage":
        if self.content is None and self.role != "assistant":
            raise ValueError("no content")
        return self

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else "".join([part.text for part in parts])

    @property
    def plain(self) -> dict[str, Any]:
        """The message for a chat template. Templates call a developer "system"."""
        plain: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            plain["tool_calls"] = [call.plain for call in self.tool_calls]
        if self.tool_call_id:
            plain["tool_call_id"] = self.tool_call_id
        if self.name:
            plain["name"] = self.name
        return plain


class ToolFunction(Strict):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction


class ChosenName(Strict):
    name: str


class ChosenTool(Strict):
    type: Literal["function"]
    function: ChosenName
