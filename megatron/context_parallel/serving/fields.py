"""The fields of OpenAI's and vLLM's requests without an effect here, with the values at which they have none there."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Neutral:
    """A field that is only accepted with values that change nothing.

    Attributes:
        values: these values, besides null.
        advice: what to do instead.
    """

    values: tuple[Any, ...] = ()
    advice: str = "leave it out"


# They say something about the request, and nothing about its text.
IGNORED = frozenset(
    [
        *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
        *("session_id", "store", "user"),
    ]
)

NEUTRAL: Mapping[str, Neutral] = {
    "add_generation_prompt": Neutral((True,), "the template always begins an answer"),
    "add_special_tokens": Neutral((), "the tokenizer's own setting holds; send tokens to choose them"),
    "allowed_token_ids": Neutral(([],), "give a regex or a choice in structured_outputs"),
    "audio": Neutral(),
    "bad_words": Neutral(([],), "give logit_bias of -100 for their tokens"),
    "best_of": Neutral((1,), "give n, and choose yourself"),
    "cache_salt": Neutral((), "cached prompts are only shared within one API key; use one for each user"),
    "chat_template": Neutral((), "the template of the model is used; send the text to /v1/completions"),
    "continue_final_message": Neutral((False,), "send the text so far to /v1/completions"),
    "documents": Neutral(([],), "put them into a message"),
    "ec_transfer_params": Neutral(({},)),
    "function_call": Neutral(("none", "auto"), "give tool_choice"),
    "functions": Neutral(([],), "give tools"),
    "guided_decoding_backend": Neutral(("auto", "guidance"), "leave it out: llguidance is used"),
    "guided_whitespace_pattern": Neutral((), "leave it out, or give a regex"),
    "include_reasoning": Neutral((True,), "the whole text is the content"),
    "include_stop_str_in_output": Neutral((False,), "append the stop string yourself"),
    "length_penalty": Neutral((1.0, 1), "there is no beam search"),
    "logprob_token_ids": Neutral(([],), "give logprobs"),
    "media_io_kwargs": Neutral(({},)),
    "mm_payload": Neutral(("tensors",)),
    "mm_processor_kwargs": Neutral(({},)),
    "modalities": Neutral((["text"],), "this server generates text only"),
    "moderation": Neutral(),
    "prediction": Neutral(),
    "priority": Neutral((0,), "requests are served in order of arrival"),
    "prompt_cache_options": Neutral(({},)),
    "prompt_embeds": Neutral(([],), "send text or tokens"),
    "prompt_logprobs": Neutral((), "give echo and logprobs"),
    "reasoning_effort": Neutral((), 'give chat_template_kwargs {"reasoning_effort": ...}, if the template knows it'),
    "repetition_detection": Neutral(),
    "request_id": Neutral((), "send the header X-Request-Id"),
    "return_mm_kwargs": Neutral((False,)),
    "return_prompt_text": Neutral((False,)),
    "return_token_offsets": Neutral((False,), "give logprobs, whose text_offset has them"),
    "return_tokens_as_token_ids": Neutral((False,), "give return_token_ids"),
    "routed_experts_prompt_start": Neutral((0,)),
    "skip_special_tokens": Neutral((True,), "special tokens are never part of a text; logprobs names them"),
    "spaces_between_special_tokens": Neutral((True,)),
    "stop_token_ids": Neutral(([],), "give stop strings"),
    "stream_interval": Neutral((1,)),
    "suffix": Neutral(("",), "put it into the prompt, in the form that the model was trained with"),
    "thinking_token_budget": Neutral((-1,), "give max_tokens"),
    "truncate_prompt_tokens": Neutral((), "shorten the prompt; /tokenize counts its tokens"),
    "truncation_side": Neutral(),
    "use_beam_search": Neutral((False,), "give n"),
    "verbosity": Neutral(("medium",), "say it in a message"),
    "vllm_xargs": Neutral(({},)),
    "watermarking": Neutral((False,)),
    "web_search_options": Neutral(),
}


def refusal_of(name: str, value: Any) -> str:
    """Why a field that requests here do not have is refused; "" if it is accepted."""
    if name in IGNORED:
        return ""
    if name not in NEUTRAL:
        return "unknown field; leave it out"
    neutral = NEUTRAL[name]
    if any(type(value) is type(one) and value == one for one in neutral.values):
        return ""
    return f"{shown(value)}not supported; {neutral.advice}"


def shown(value: Any) -> str:
    """A short value before what is said of it; "" for a long one."""
    if isinstance(value, int) and value.bit_length() > 64:
        return ""
    if isinstance(value, bool | int | float | str) and len(text := json.dumps(value)) <= 40:
        return f"{text} is "
    return ""
