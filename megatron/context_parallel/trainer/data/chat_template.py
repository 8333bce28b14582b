"""Chats as token ids, by the chat template of a HuggingFace tokenizer, and which of them are answers.

The template says where answers are with `{% generation %}`. Without it, an answer is what follows the chat up to it.
Either way, the tokens up to an answer must be those of the text up to it: in generation, that is the prompt.
"""

import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, NoReturn, TypeAlias

import numpy

from megatron.context_parallel.errors import UsageError

from .chats import Chat

Span: TypeAlias = tuple[int, int]  # the first character of an answer, and its end

_AT_ONCE = 256  # chats: the tokenizer uses all cores for a list of texts
_MARKER = re.compile(r"{%-?\s*generation\s*-?%}")
_MARKED = "mark answers in the template with {% generation %} and {% endgeneration %}"


class ChatTemplate:
    """The chat template of the tokenizer in a folder.

    Raises:
        UsageError: the folder has no tokenizer, or it has no chat template.
    """

    def __init__(self, folder: str) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when imported, below
        from transformers import AutoTokenizer

        self.folder = folder
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            self.template = self.tokenizer.get_chat_template()
        except Exception as error:
            why = f"--sft needs a tokenizer with a chat template ({_short(error)})"
            raise UsageError(f"--tokenizer-model {folder}: {why}; add a chat_template.jinja") from None
        self.marked = bool(_MARKER.search(self.template))
        added = self.tokenizer.added_tokens_decoder
        self.special_ids = {number for number, token in added.items() if token.special}
        self.specials = tuple(added[number].content for number in self.special_ids)

    def tokens_of(self, chats: Iterable[Chat]) -> Iterator[tuple[numpy.ndarray, numpy.ndarray]]:
        """Of each chat, the token ids, int32 [tokens], and whether each is of an answer, bool [tokens].

        An answer ends with its end-of-turn token: without `{% generation %}`, white space after a special token is left
        out.

        Raises:
            UsageError: the template refuses a chat or does not show where its answers are; one line with its place.
        """
        remaining = iter(chats)
        while some := [*islice(remaining, _AT_ONCE)]:
            rendered = [self._marked(chat) if self.marked else self._unmarked(chat) for chat in some]
            encoded = self._encode([text for text, _ in rendered], some[0].place)
            begun = []  # for each edge of an answer: the last special token before it
            tails = []  # and the text from there up to the edge
            for number, (text, answers) in enumerate(rendered):
                for edge in chain(*answers):
                    token, first = self._last_special(encoded, number, edge)
                    begun.append(token)
                    tails.append(text[first:edge])
            edges = zip(begun, self._encode(tails, some[0].place).input_ids, strict=True)
            for chat, (_, answers), ids in zip(some, rendered, encoded.input_ids, strict=True):
                learned = numpy.zeros(len(ids), bool)
                for _ in answers:
                    begin = _boundary(chat, ids, *next(edges))
                    end = _boundary(chat, ids, *next(edges))
                    learned[begin:end] = True
                yield numpy.array(ids, numpy.int32), learned

    def _encode(self, texts: list[str], place: str) -> Any:
        try:
            return self.tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        except Exception as error:
            _refuse(f"{place} or after it", f"cannot be tokenized ({_short(error)}); correct its text")

    def _last_special(self, encoded: Any, number: int, edge: int) -> tuple[int, int]:
        """The last special token before character `edge` of text `number`, and its first character; 0, 0 if none.

        What precedes a special token has no influence on the tokens after it.
        """
        ids = encoded.input_ids[number]
        for character in range(edge - 1 if self.tokenizer.is_fast else -1, -1, -1):
            token = encoded.char_to_token(number, character)
            if token is not None and ids[token] in self.special_ids:
                return token, encoded.token_to_chars(number, token).start
        return 0, 0

    def _marked(self, chat: Chat) -> tuple[str, list[Span]]:
        """The text of a chat, and its answers as the template marks them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                [chat.messages],
                chat_template=self.template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            _refuse(chat.place, self._refuses(error))
        (text,), (answers,) = rendered
        wanted = sum(message["role"] == "assistant" for message in chat.messages)
        if len(answers) < wanted:
            _refuse(chat.place, f"the chat template marks {len(answers)} of {wanted} answers; {_MARKED}")
        return text, answers

    def _unmarked(self, chat: Chat) -> tuple[str, list[Span]]:
        """The text of a chat, and its answers: what each adds to the text up to it."""
        messages = chat.messages
        text = self._render(chat, messages)
        answers = []
        for number, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(chat, messages[:number], add_generation_prompt=True)
                after = self._render(chat, messages[: number + 1])
                if not text.startswith(after) or not after.startswith(before):
                    why = f"the chat up to message {number + 1} is not the beginning of the whole chat"
                    _refuse(chat.place, f"{why} in this chat template; {_MARKED}")
                answer = after[len(before) :]
                promptless = "add_generation_prompt" not in self.template
                if promptless and not answer.lstrip().startswith(message["content"].strip()):
                    why = f"message {number + 1} does not begin with its content, and there is no generation prompt"
                    _refuse(chat.place, f"{why} in this chat template; {_MARKED}")
                turn = answer.rstrip() if answer.rstrip().endswith(self.specials) else answer
                answers.append((len(before), len(before) + len(turn)))
        return text, answers

    def _render(self, chat: Chat, messages: list[dict[str, Any]], **how: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, **how)
        except Exception as error:
            _refuse(chat.place, self._refuses(error))

    def _refuses(self, error: Exception) -> str:
        why = f"the chat template of --tokenizer-model {self.folder} refuses the chat ({_short(error)})"
        return f"{why}; correct the chat, or give another chat_template.jinja"


def _boundary(chat: Chat, ids: list[int], begun: int, tail: list[int]) -> int:
    """The number of tokens up to an edge of an answer, whose last ones are `tail`, from token `begun` on.

    Raises:
        UsageError: they are others in the whole chat.
    """
    end = begun + len(tail)
    if ids[begun:end] != tail:
        why = "a token of the chat reaches across the beginning or the end of an answer"
        _refuse(chat.place, f"{why}; leave out white space there, or let the chat template put special tokens there")
    return end


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _refuse(place: str, why: str) -> NoReturn:
    raise UsageError(f"{place}: {why}")
