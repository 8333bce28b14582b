"""What a text must look like: a JSON schema, a regex, a choice or a grammar, as a grammar for the engine."""

import json
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron.context_parallel.errors import UsageError

from .messages import Strict

Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]
Schema = dict[str, Any] | str


class NamedSchema(Strict):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's field. Fields with a single value are accepted because clients send them."""

    json_: Schema | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: None = None
    structural_tag: None = None


class Structured(Strict):
    """The fields of a request that say what its text looks like; at most one has an effect."""

    response_format: ResponseFormat | None = Field(
        None, description='an object with type "text", "json_object", or "json_schema" with the schema in json_schema'
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="an object with one of json, json_object, regex, choice and grammar (Lark or GBNF)"
    )
    guided_json: Schema | None = Field(None, description="a JSON schema")
    guided_regex: str | None = Field(None, description="a regular expression")
    guided_choice: Choices | None = Field(None, description="a list of texts")
    guided_grammar: str | None = Field(None, description="a grammar in Lark or GBNF")

    def grammars(self) -> list[str]:
        """The grammars of these fields, in llguidance's form. Raises ValueError for one that cannot be read."""
        found = [_of_schema(self.guided_json), _of_regex(self.guided_regex)]
        found += [_of_choice(self.guided_choice), _of_grammar(self.guided_grammar)]
        found.append(_of_response(self.response_format))
        if given := self.structured_outputs:
            chosen = [_of_schema(given.json_), _of_regex(given.regex), _of_choice(given.choice)]
            chosen += [_of_grammar(given.grammar), _of_schema({"type": "object"} if given.json_object else None)]
            if not any(chosen) and given.json_object is None:
                raise ValueError("structured_outputs: give one of json, json_object, regex, choice and grammar")
            found += chosen
        return [grammar for grammar in found if grammar]


def check_grammar(grammar: str) -> None:
    """Raise UsageError for a grammar that is invalid."""
    from llguidance import LLMatcher

    if why := LLMatcher.validate_grammar(grammar):
        raise UsageError(f"the grammar is invalid ({_in_a_line(why)}); correct it")


def has_library() -> bool:
    """Whether texts can follow a grammar here."""
    return find_spec("llguidance") is not None


def _matcher() -> Any:
    """The class that makes grammars. Raises UsageError without its library."""
    if not has_library():
        raise UsageError("texts that follow a grammar need a library; install llguidance where the server runs")
    from llguidance import LLMatcher

    return LLMatcher


def schema_grammar(schema: Schema) -> str:
    """The grammar of a JSON schema."""
    return _matcher().grammar_from_json_schema(schema)


def _of_schema(schema: Schema | None) -> str:
    return "" if schema is None else schema_grammar(schema)


def _of_response(form: ResponseFormat | None) -> str:
    if form is None:
        return ""
    if form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise ValueError("response_format: json_schema has no schema")
        return schema_grammar(form.json_schema.schema_)
    if form.json_schema is not None:
        raise ValueError(f'response_format: json_schema needs type "json_schema", not "{form.type}"')
    return schema_grammar({"type": "object"}) if form.type == "json_object" else ""


def _of_regex(regex: str | None) -> str:
    return "" if regex is None else _matcher().grammar_from_regex(regex)


def _of_choice(choice: list[str] | None) -> str:
    return "" if choice is None else _of_grammar("start: " + " | ".join([json.dumps(one) for one in choice]))


def _of_grammar(grammar: str | None) -> str:
    if grammar is None:
        return ""
    matcher = _matcher()
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return matcher.grammar_from_lark(any_to_lark(grammar))
    except Exception as error:  # of a reader of a client's text
        raise ValueError(f"the grammar cannot be read ({_in_a_line(str(error))})") from None


def _in_a_line(why: str) -> str:
    return " ".join(why.split())[:200]
