"""Reads files of chats: JSON lines with the messages of a chat each."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron.context_parallel.errors import UsageError

ROLES = ("system", "user", "assistant", "tool")
EXAMPLE = '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}'


@dataclass(frozen=True)
class Chat:
    """A chat: its messages have `role`, `content` and what else the template reads. `place` is its file and line."""

    place: str
    messages: list[dict[str, Any]]


def read_chats(path: str) -> Iterator[Chat]:
    """The chats of a file. Blank lines are skipped. A system message begins another chat, as in Megatron-LM.

    Raises:
        UsageError: the file cannot be read, or a line is not a chat with an answer; one line that names file and line.
    """
    try:
        with open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield from _chats_of(line, f"{path} line {number}")
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}); give a file with lines such as {EXAMPLE}"
        ) from None


def _chats_of(line: bytes, place: str) -> Iterator[Chat]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        _refuse(place, "not UTF-8")
    except json.JSONDecodeError as error:
        _refuse(place, f"not JSON ({error.msg})")
    except RecursionError:
        _refuse(place, "nested too deeply")
    if not isinstance(record, dict):
        _refuse(place, "not an object")
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        _refuse(place, f"no list under the key messages (it has {', '.join(record) or 'no key'})")
    if record.get("tools"):
        raise UsageError(
            f"{place}: tools are not supported; leave this chat out, or write them into its system message"
        )
    begun: list[dict[str, Any]] = []
    for number, message in enumerate(messages, 1):
        _check_message(message, f"{place} message {number}")
        if message["role"] == "system" and begun:
            yield _answered(place, begun)
            begun = []
        begun.append({key: value for key, value in message.items() if value is not None})
    yield _answered(place, begun)


def _check_message(message: object, place: str) -> None:
    if not isinstance(message, dict):
        _refuse(place, "not an object")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UsageError(f"{place}: role {json.dumps(role)} is unknown; give {', '.join(ROLES)}")
    if not isinstance(content, str):
        _refuse(place, "no text under the key content")
    if not content.isascii() and any("\ud800" <= letter <= "\udfff" for letter in content):
        raise UsageError(f"{place}: half of a surrogate pair is not text; correct the content")
    if role == "assistant" and not content:
        raise UsageError(f"{place}: the assistant's answer is empty; give it text, or leave the message out")


def _answered(place: str, messages: list[dict[str, Any]]) -> Chat:
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise UsageError(f"{place}: a chat has no answer of the assistant, so nothing to learn; leave it out")
    if roles[0] == "assistant":
        raise UsageError(f"{place}: a chat begins with an answer of the assistant; begin with a message of the user")
    return Chat(place, messages)


def _refuse(place: str, why: str) -> NoReturn:
    raise UsageError(f"{place}: {why}; write lines such as {EXAMPLE}")
