"""Converts a stream of tokens to text: only whole characters, and nothing from a stop string on."""

from collections.abc import Callable, Sequence

_BROKEN = "\ufffd"  # decoders return it for bytes that are not, or not yet, a character


class TextStream:
    """The final part of the text after a prompt.

    Args:
        decode: converts tokens to text.
        stop: strings that end the text; they are not part of it.
        prompt: the last tokens of the prompt; some tokenizers decode the first token of a text differently.
        free: the number of first tokens in whose text no stop string is looked for.

    Attributes:
        stopped: whether a stop string was generated.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: Sequence[str], prompt: Sequence[int], free: int = 0
    ) -> None:
        self._decode = decode
        self._free = free
        self._stop = [text for text in stop if text]
        self._tokens = [*prompt[-8:]]
        text = decode(self._tokens)
        self._shown = len(text.rstrip(_BROKEN))
        self._begun = text[self._shown :]  # of a character that the prompt begins, and this text may end
        self._new = 0  # tokens since the last whole character
        self._held = ""  # possible start of a stop string
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that has become final with one more token."""
        self._tokens.append(token)
        self._new += 1
        self._free -= 1
        text = self._decode(self._tokens)
        certain = text.rstrip(_BROKEN)
        found = certain[self._shown :]
        if found:
            found, self._begun = found.removeprefix(self._begun), ""
        self._shown = max(self._shown, len(certain))
        if certain == text:
            self._forget(text, found)
        return found if self._free >= 0 else self._before_stop(found)

    def _forget(self, text: str, found: str) -> None:
        """Drop the tokens that later decodes do not need. All decode to `text`, of which `found` is new."""
        new = self._tokens[-self._new :]
        if alone := self._decode(new):
            self._tokens, self._shown = new, len(alone)
        elif text and not found:  # special tokens: behind them alone, some tokenizers decode a word without its space
            del self._tokens[-self._new :]
        self._new = 0

    def finish(self) -> str:
        """The rest: a possible start of a stop string, and bytes that are not a character, as U+FFFD."""
        rest = self._before_stop(self._decode(self._tokens)[self._shown :].removeprefix(self._begun))
        held, self._held = self._held, ""
        return rest if self.stopped else rest + held

    def _before_stop(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        if places := [text.index(stop) for stop in self._stop if stop in text]:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        keep = max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a start of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
