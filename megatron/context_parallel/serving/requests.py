"""Converts a client's request to requests of the engine."""

import secrets
from collections.abc import Sequence

from megatron.core.inference.sampling_params import SamplingParams

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.inference.engine import Engine
from megatron.context_parallel.inference.request import Request
from megatron.context_parallel.inference.rules import Rules

from .protocol import Body, Refused

_MOST_LOGPROBS = 1 << 20  # per HTTP request: rank 0 keeps all of them until its last text ends


def requests_of(
    body: Body, prompts: Sequence[list[int]], name: str, key: str, engine: Engine, new: int
) -> list[Request]:
    """A request for each text: `body.n` for each prompt.

    Args:
        body: the client's request.
        prompts: the tokens of each prompt.
        name: the id of the HTTP request.
        key: a hash of the client's key.
        engine: the engine that will run them.
        new: the default maximum tokens of a text.

    Raises:
        Refused: a prompt can never run or not be handed over, or there are too many log-probabilities.
    """
    handoff = ""
    if body.kv_transfer_params:
        _check_handoff(body, prompts, engine)
        handoff = secrets.token_hex(16)
    rules = Rules() if handoff else _rules(body, engine)
    scored = body.echoes and body.logprobs_returned is not None
    found = list[Request]()
    seed = secrets.randbits(62) if body.seed is None else body.seed
    for tokens in prompts:
        wanted = max(1, min(new, engine.length - len(tokens))) if body.new_tokens is None else body.new_tokens
        params = _params(body, 1 if handoff else wanted)
        try:
            engine.check(tokens, params.num_tokens_to_generate)
        except UsageError as error:
            raise Refused(400, str(error), param="prompt", code="context_length_exceeded") from None
        if rules.min_tokens > wanted:
            why = f"min_tokens: {rules.min_tokens} is above max_tokens {wanted}; give at most that"
            raise Refused(400, why, param="min_tokens")
        twin = ""
        for number in range(len(found), len(found) + (body.n or 1)):
            one = Request(f"{name}-{number}", tokens, params, seed + number, key, twin, handoff, rules, scored)
            found.append(one)
            twin = twin or one.name
    told = sum(request.params.num_tokens_to_generate + scored * len(request.tokens) for request in found)
    _check_logprobs(body, told)
    return found


def _rules(body: Body, engine: Engine) -> Rules:
    rules = body.rules
    vocabulary = engine.cache.vocabulary
    if wrong := [token for token, _ in rules.logit_bias if token >= vocabulary]:
        why = f"logit_bias: token {wrong[0]}; the vocabulary is 0 to {vocabulary - 1}"
        raise Refused(400, why, param="logit_bias")
    return rules


def _check_handoff(body: Body, prompts: Sequence[list[int]], engine: Engine) -> None:
    field = "kv_transfer_params"
    if not engine.handed:
        why = "this server keeps its keys and values to itself; start it with --handoff-host"
        raise Refused(400, f"{field}: {why}", param=field)
    if body.stream or len(prompts) * (body.n or 1) != 1:
        raise Refused(400, f"{field}: one prompt, one text and no stream; send them one by one", param=field)


def _check_logprobs(body: Body, new: int) -> None:
    told = 0 if body.logprobs_returned is None else 1 + body.logprobs_returned
    if told * new > _MOST_LOGPROBS:
        why = f"logprobs: {told} for each of {new} tokens; request fewer texts or tokens, at most {_MOST_LOGPROBS}"
        raise Refused(400, f"{why} log-probabilities in total", param="logprobs")


def _params(body: Body, new: int) -> SamplingParams:
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=body.top_p or 0.0,
        return_log_probs=body.logprobs_returned is not None,
        top_n_logprobs=body.logprobs_returned or 0,
        num_tokens_to_generate=new,
        stop_words=stop,
    )
