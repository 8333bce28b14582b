"""Random requests to engines on several ranks with small caches: each text is that of the request alone on one rank.

    python -m tests.campaigns.engines --seconds 60 --seed 1

Requests arrive at any time, share prefixes, have rules and windows, wait for space, are cancelled, and are handed over
to decoders, who read the rows of all ranks. Free pages are full of NaN. Each failure prints the number that runs it
again (`--only`). The exit status is 1 if there is one.
"""

import json
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from llguidance import LLMatcher
from megatron.core import parallel_state
from megatron.core.inference.sampling_params import SamplingParams
from torch import Tensor

from megatron.context_parallel.inference.engine import Engine
from megatron.context_parallel.inference.handoff.sequences import HandedSequences
from megatron.context_parallel.inference.prefill_chunks import PrefillChunks
from megatron.context_parallel.inference.rank_loop import RankLoop, _plain
from megatron.context_parallel.inference.request import Request
from megatron.context_parallel.inference.rules import Rules
from megatron.context_parallel.inference.sampling import Token
from megatron.context_parallel.inference.tokenizer import ByteTokenizer
from tests.support.numbered_cases import numbered, read_flags
from tests.support.ranks import Ranks
from tests.support.session_case import VOCABULARY, poison, session, start

RANKS = 6
CLOSE = 2e-4  # of log-probabilities, and of keys and values
Rows = dict[str, dict[int, Tensor]]  # by handoff and position: keys and values of all layers


@dataclass
class Case:
    """A model, an engine, and what arrives before its steps.

    Attributes:
        tensor, context: the tensor- and context-parallel ranks.
        positions: of the tokens, "rope" or "learned_absolute"; changes: of the model; how: of the session.
        chunks: prompt tokens of a step, as `PrefillChunks` takes them.
        warm: whether the engine is warmed up.
        arriving: requests by step; cancelled, released: names by step.
    """

    tensor: int
    context: int
    positions: str
    changes: dict[str, Any]
    how: dict[str, Any]
    chunks: list[tuple[int, int]]
    warm: bool = False
    arriving: dict[int, list[Request]] = field(default_factory=dict)
    cancelled: dict[int, list[str]] = field(default_factory=dict)
    released: dict[int, list[str]] = field(default_factory=dict)


@dataclass
class Found:
    """What a rank has of each request: its tokens, text, how it ended, those of its prompt, and rows of handoffs."""

    tokens: dict[str, list[Token]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    finish: dict[str, str] = field(default_factory=dict)
    scores: dict[str, list[Token]] = field(default_factory=dict)
    rows: Rows = field(default_factory=dict)


# Letters below 20, with each third one above.
GRAMMAR = LLMatcher.grammar_from_regex(r"([\x01-\x13][\x01-\x13][\x14-\x1c])*")


class Letters(ByteTokenizer):
    """Token 0 ends a text."""

    def __init__(self) -> None:
        super().__init__(0)


def draw(random: Random) -> Case:
    tensor = random.choice((1, 1, 1, 2))
    context = random.randint(1, RANKS // tensor)
    how = {"cache_tokens": random.choice((130, 200, 400)), "page": random.choice((1, 4, 8, 8, 16))}
    how |= {"prefill": random.choice(("pass-kv", "pass-q", "pass-q-all-to-all", "auto", "empirical"))}
    how |= {"frozen": random.random() < 0.5}
    how["cache_tokens"] = max(how["cache_tokens"], 4 * how["page"] * context)
    positions = random.choice(("rope", "rope", "learned_absolute"))
    case = Case(tensor, context, positions, _changes(random, tensor), how, _chunks(random), random.random() < 0.3)
    prompts: list[list[int]] = []
    for number in range(random.randint(4, 14)):
        begin = random.choice(prompts) if prompts and random.random() < 0.6 else []
        more = [random.randrange(1, VOCABULARY) for _ in range(random.choice((1, 2, 16, 30)))]
        prompts.append([*begin[: random.randint(0, len(begin))], *more][-70:])
        _add(random, case, f"{number}", prompts[-1])
    return case


def _changes(random: Random, tensor: int) -> dict[str, Any]:
    changes: dict[str, Any] = {"num_query_groups": random.choice((1, 2, 4)), "num_layers": 2}
    if random.random() < 0.5:
        changes |= {"window_size": (random.choice((1, 4, 9)), 0)}
        changes |= {"window_attn_skip_freq": random.choice((None, None, 2))}
    changes["softmax_type"] = random.choice(("vanilla", "learnable"))
    changes["qk_layernorm"] = random.random() < 0.2
    if tensor == 1 and random.random() < 0.15:
        changes |= {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}
    return changes


def _chunks(random: Random) -> list[tuple[int, int]]:
    """Always so many tokens, or others with more cached ones, and while texts are generated."""
    if random.random() < 0.5:
        return [(random.choice((1, 3, 16, 50)),) * 2]
    return [(random.choice((3, 16, 50)), random.choice((1, 2, 5, 16))) for _ in range(random.randint(1, 6))]


def _add(random: Random, case: Case, name: str, prompt: list[int]) -> None:
    """A request, maybe with a twin, that arrives at some step and may be cancelled or handed over."""
    at, new = random.randint(0, 40), random.choice((0, 1, random.randint(1, 25), random.randint(1, 25)))
    params = SamplingParams(
        temperature=random.choice((0.0, 0.0, 0.7, 1.0)),
        top_p=random.choice((0.0, 0.0, 0.8)),
        top_k=random.choice((0, 0, 1, 5)),
        num_tokens_to_generate=new,
        return_log_probs=True,
        top_n_logprobs=random.choice((0, 0, 3, 2 * VOCABULARY)),
        stop_words=random.choice((None, None, [_letters(random, 1)], [_letters(random, 2), _letters(random, 1)])),
    )
    scored, key = random.random() < 0.15, random.choice(("", "", "", "a"))
    one = Request(name, prompt, params, random.randrange(1000), key, rules=_rules(random, new), scored=scored)
    if random.random() < 0.2:
        params = replace(params, num_tokens_to_generate=1)
        one = replace(one, handoff=f"h{name}", params=params, rules=Rules())
        case.released.setdefault(at + random.randint(0, 60), []).append(one.handoff)
    elif random.random() < 0.3:
        case.arriving.setdefault(at, []).append(replace(one, name=f"{name}b", seed=one.seed + 1, twin=name))
    case.arriving.setdefault(at, []).insert(0, one)
    if random.random() < 0.15 and not one.handoff:
        case.cancelled.setdefault(at + random.randint(0, 20), []).append(name)


def _letters(random: Random, count: int) -> str:
    return "".join(chr(random.randrange(1, VOCABULARY)) for _ in range(count))


def _rules(random: Random, new: int) -> Rules:
    given: dict[str, Any] = {"ignore_ends": random.random() < 0.3}
    if random.random() < 0.4:
        given |= {"repetition_penalty": random.choice((1.0, 1.3, 0.7)), "min_tokens": min(new, 4)}
        given |= {"frequency_penalty": random.choice((0.0, 0.5)), "presence_penalty": random.choice((0.0, -1.0))}
        given |= {"min_p": random.choice((0.0, 0.3))}
    if random.random() < 0.2:
        given["logit_bias"] = [(random.randrange(VOCABULARY), 4.0), (random.randrange(VOCABULARY), -100.0)]
    if random.random() < 0.15:
        given["grammar"] = GRAMMAR
    return Rules(**given)


# ------------------------------------------------------------------------------------------------ on the ranks


def _engine(case: Case) -> Engine:
    start(case.tensor)
    of = session(case.positions, changes=case.changes, **case.how)
    handed = HandedSequences(of.tables, of.cache, of.cp.rank)
    return Engine(of, Letters(), PrefillChunks(case.chunks), 160, of.tables.n * of.tables.page, handed)


def together(case: Case) -> Found:
    """All requests in one engine."""
    loop, found = RankLoop(engine := _engine(case)), Found()
    if case.warm:
        engine.warm_up()
    last = max([0, *case.arriving, *case.cancelled, *case.released])
    for step in range(5000):
        if step > last and (engine.idle or engine.blocked):
            _release(engine)
            if engine.idle:
                break
        released = case.released.get(step, [])
        arrived = {
            "requests": [*map(_plain, case.arriving.get(step, []))],
            "cancelled": case.cancelled.get(step, []),
            "released": released,
        }
        for name in [*engine.pinned]:
            found.rows.setdefault(name, _rows(engine, name))
        for output in loop._step(json.loads(json.dumps(arrived))):
            _note(found, output)
        poison(engine.cache)
    _empty(engine)
    assert not engine.running and not engine.waiting, "requests are left"
    _check_nothing_is_left(engine)
    parallel_state.destroy_model_parallel()
    return found


def _check_nothing_is_left(engine: Engine) -> None:
    """An engine without requests is as it was at first, but for the order of its pages."""
    tables, prefixes = engine.cache.tables, engine._prefixes
    assert engine.cache.room() == engine.capacity, "pages are left"
    assert not any(tables.rows()) and not tables._rank_rows, "rows or sequences are left"
    for pool in tables._pools:
        assert pool.free == [*range(len(pool.references))] and not any((*pool.references, *pool.filled)), "pages"
    assert not (prefixes._cached or prefixes._hashes or prefixes._holders), "prefixes are left"
    assert not (engine._reusable or engine._ended or engine.handed._open), "sequences are left"


def _release(engine: Engine) -> None:
    """End the handoffs whose prefill began too late for their release."""
    for name in [*engine.pinned]:
        engine.release(name)


def _note(found: Found, output) -> None:
    name = output.request
    found.tokens.setdefault(name, []).extend(output.tokens)
    found.texts[name] = found.texts.get(name, "") + output.text
    if output.prompt:
        found.scores[name] = [*output.prompt]
    if output.finish:
        found.finish[name] = output.finish


def _rows(engine: Engine, handoff: str) -> dict[int, Tensor]:
    """What decoders read of a pinned sequence on this rank."""
    handed, rows = engine.handed, {}
    reading = handed.find(handoff)
    pieces, complete = reading.pieces()
    assert complete, f"{handoff} is pinned, and not all of its rows are finished"
    heads = engine.cache.cache.layers[0][0].shape[2]
    for piece in range(pieces):
        positions = reading.positions(piece, 0).tolist()
        layers = [torch.frombuffer(bytearray(reading.rows(piece, 0, layer, slice(0, heads))), dtype=torch.float32)
                  for layer in range(len(engine.cache.cache.layers))]  # fmt: skip
        both = torch.stack([of.view(2, len(positions), -1) for of in layers])
        rows |= {position: both[:, :, i] for i, position in enumerate(positions)}
    return rows


def alone(case: Case) -> Found:
    """Each request alone, in a cache that is large and empty."""
    found = Found()
    how = case.how | {"cache_tokens": 800, "prefill": "pass-kv"}
    engine = _engine(replace(case, how=how, chunks=[(500, 500)]))
    for request in [one for requests in case.arriving.values() for one in requests]:
        engine.add(request)
        while not engine.idle:
            for output in engine.step():
                _note(found, output)
            found.rows |= {name: _rows(engine, name) for name in engine.pinned}
        _empty(engine)
    parallel_state.destroy_model_parallel()
    return found


def _empty(engine: Engine) -> None:
    """Release and forget all sequences."""
    _release(engine)
    engine.forget()


# ------------------------------------------------------------------------------------------------ the comparison


def check(ranks: Ranks, case: Case) -> int:
    """How many tokens were compared.

    Raises:
        AssertionError: a text, a log-probability or a row differs, or ranks have other texts.
    """
    of_alone = ranks(case.tensor, alone, case)
    of_ranks = ranks(case.tensor * case.context, together, case)
    for found in of_ranks:
        same = found.tokens == of_ranks[0].tokens and found.texts == of_ranks[0].texts
        assert same and found.finish == of_ranks[0].finish, "ranks have other texts"
    expected, found = of_alone[0], of_ranks[0]
    cancelled = {name for names in case.cancelled.values() for name in names}
    for request in [one for requests in case.arriving.values() for one in requests]:
        name, tokens = request.name, found.tokens.get(request.name, [])
        wanted, text = expected.tokens.get(name, []), expected.texts.get(name, "")
        if name in cancelled and found.finish.get(name) == "cancelled":
            wanted = wanted[: len(tokens)]
            assert text.startswith(found.texts[name]), f"text of {name}"
        else:
            assert found.finish.get(name) == expected.finish[name], f"{name} ends with {found.finish.get(name)}"
            assert found.texts.get(name, "") == text, f"text of {name}: {found.texts.get(name)!r}, not {text!r}"
        _compare(name, tokens, wanted)
        if name in found.scores:
            _compare(f"prompt of {name}", found.scores[name], expected.scores[name])
        if request.handoff in found.rows:
            for tensor, of_one in enumerate(of_alone):
                parts = [of.rows[request.handoff] for of in of_ranks[tensor :: case.tensor]]
                _compare_rows(request, parts, of_one.rows[request.handoff])
    return sum(map(len, found.tokens.values()))


def _compare(what: str, tokens: list[Token], wanted: list[Token]) -> None:
    ids = [token.id for token in tokens], [token.id for token in wanted]
    assert ids[0] == ids[1], f"{what}: {tokens}, not {wanted}"
    for token, expected in zip(tokens, wanted, strict=True):
        assert abs(token.logprob - expected.logprob) < CLOSE, f"{what}: {token}, not {expected}"
        values = [[value for _, value in of.top] for of in (token, expected)]
        assert len(values[0]) == len(values[1]), f"{what}: {token}, not {expected}"
        apart = [abs(one - other) for one, other in zip(*values, strict=True)]
        assert all(distance < CLOSE for distance in apart), f"{what}: {token}, not {expected}"
        likeliest = dict(expected.top)
        for number, value in token.top:
            assert abs(value - likeliest.get(number, value)) < CLOSE, f"{what}: {token}, not {expected}"


def _compare_rows(request: Request, parts: list[dict[int, Tensor]], whole: dict[int, Tensor]) -> None:
    """The rows that the ranks of a sequence hold are those of one rank, and each is there once."""
    rows = [pair for part in parts for pair in part.items()]
    assert sorted(position for position, _ in rows) == [*range(len(request.tokens))], f"rows of {request.name}"
    for position, row in rows:
        assert (row - whole[position]).abs().max() < CLOSE, f"row {position} of {request.name}"


def main() -> int:
    args = read_flags(__doc__.splitlines()[0], "engine")
    ranks, counts = Ranks(RANKS), Counter[str]()
    for again, random in numbered(args):
        case = draw(random)
        try:
            counts["tokens"] += check(ranks, case)
            counts["engines"] += 1
            counts["requests"] += sum(map(len, case.arriving.values()))
            counts["handoffs"] += sum(map(len, case.released.values()))
        except AssertionError as error:
            counts["failed"] += 1
            print(f"{again}: {error}: {case}", flush=True)
    ranks.close()
    print(", ".join(f"{counts[name]} {name}" for name in ("engines", "requests", "handoffs", "tokens", "failed")))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
