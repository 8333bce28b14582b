"""Calls of tools in generated texts, in the forms in which models write them."""

import json
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.context_parallel.inference.text_stream import overlap

from .messages import Tool

_BEGIN = "<tool_call>"  # Qwen and Hermes
_BLOCK = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_LISTS = "[TOOL_CALLS]", "<|python_tag|>"  # Mistral and Llama, if their special tokens are part of the text


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` is JSON."""

    name: str
    arguments: str

    def plain(self, index: int | None = None) -> dict[str, Any]:
        """As in an answer; with an index, as in a chunk of a stream."""
        place = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return place | {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def schema_of_calls(tools: Sequence[Tool], most: int | None) -> dict[str, Any]:
    """The JSON schema of a list of one or more calls, at most `most`."""
    calls = []
    for tool in tools:
        properties = {"name": {"const": tool.function.name}, "arguments": schema_of_arguments(tool)}
        calls.append(
            {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
        )
    limit = {} if most is None else {"maxItems": most}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}}


def schema_of_arguments(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object"}


@dataclass
class CallReader:
    """Separates the calls of one text from its content, as it is generated.

    Args:
        names: the tools that may be called.
        forced: the text is the arguments of this tool.
        listed: the text is a list of calls.
    """

    names: Collection[str]
    forced: str | None = None
    listed: bool = False

    def __post_init__(self) -> None:
        self._held = ""
        self._is_text = False  # whether the text begins with content

    def push(self, text: str) -> str:
        """The content that has become final with more text: none from a possible call on."""
        self._held += text
        if self.forced is not None or self.listed:
            return ""
        if not self._is_text:
            start = self._held.lstrip()
            self._is_text = bool(start) and start[0] not in "{[" and not start.startswith(("<tool", "<|py"))
            self._is_text &= not any(mark.startswith(start) for mark in (_BEGIN, *_LISTS))
        if not self._is_text:
            return ""
        end = self._held.find(_BEGIN)
        if end < 0:
            end = len(self._held) - overlap(self._held, _BEGIN)
        content, self._held = self._held[:end], self._held[end:]
        return content

    def finish(self) -> tuple[str, list[Call]]:
        """The rest of the content, and the calls."""
        if self.forced is not None:
            return "", [Call(self.forced, self._held)]
        if _BEGIN in self._held:
            blocks = [_calls(block) for block in _BLOCK.findall(self._held)]
            if all(self._known(calls) for calls in blocks):
                return _BLOCK.sub("", self._held).strip(), [call for calls in blocks for call in calls]
            return self._held, []
        text = self._held.strip()
        for mark in _LISTS:
            text = text.removeprefix(mark)
        if not self._is_text and self._known(calls := _calls(text)):
            return "", calls
        return self._held, []

    def _known(self, calls: list[Call]) -> bool:
        return bool(calls) and all(call.name in self.names for call in calls)


def _calls(text: str) -> list[Call]:
    """The calls of a JSON object or list; none if it is something else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for one in found if isinstance(found, list) else [found]:
        arguments = one.get("arguments", one.get("parameters")) if isinstance(one, dict) else None
        if not isinstance(arguments, dict) or not isinstance(one.get("name"), str):
            return []
        calls.append(Call(one["name"], json.dumps(arguments, ensure_ascii=False)))
    return calls
