"""Random requests to engines on several ranks with small caches: each text is that of the request alone on one rank.

    python -m tests.campaigns.engines --seconds 60 --seed 1

Requests arrive at any time, share prefixes, have rules and windows, wait for space, are cancelled, and are handed over
to decoders, who read the rows of all ranks. Free pages are full of NaN. Each failure prints the number that runs it
again (`--only`). The exit status is 1 if there is one.
"""

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.inference.sampling_params import SamplingParams
from torch import Tensor

from megatron.context_parallel.inference.engine import Engine
from megatron.context_parallel.inference.handoff.sequences import HandedSequences
from megatron.context_parallel.inference.rank_loop import RankLoop, _plain
from megatron.context_parallel.inference.request import Request
from megatron.context_parallel.inference.rules import Rules
from megatron.context_parallel.inference.tokenizer import ByteTokenizer
from tests.support.ranks import Ranks
from tests.support.session_case import VOCABULARY, poison, session, start

RANKS = 6
CLOSE = 2e-4  # of log-probabilities, and of keys and values
Rows = dict[str, dict[int, Tensor]]  # by handoff and position: keys and values of all layers


@dataclass
class Case:
    """A model, an engine, and what arrives before its steps.

    Attributes:
        changes: of the model; how: of the session; chunks: prompt tokens of a step.
        arriving: requests by step; cancelled, released: names by step.
    """

    ranks: int
    changes: dict[str, Any]
    how: dict[str, Any]
    chunks: int
    arriving: dict[int, list[Request]] = field(default_factory=dict)
    cancelled: dict[int, list[str]] = field(default_factory=dict)
    released: dict[int, list[str]] = field(default_factory=dict)


@dataclass
class Found:
    """What a rank has of each request: its tokens with log-probabilities, how it ended, and rows of handoffs."""

    tokens: dict[str, list[tuple[int, float]]]
    finish: dict[str, str]
    scores: dict[str, list[float]]
    rows: Rows


class Letters(ByteTokenizer):
    """Token 0 ends a text."""

    def __init__(self) -> None:
        super().__init__(0)


def draw(random: Random) -> Case:
    changes: dict[str, Any] = {"num_query_groups": random.choice((1, 2, 4)), "num_layers": 2}
    if random.random() < 0.5:
        changes |= {"window_size": (random.choice((1, 4, 9)), 0)}
        changes |= {"window_attn_skip_freq": random.choice((None, None, 2))}
    changes["softmax_type"] = random.choice(("vanilla", "learnable"))
    how = {"cache_tokens": random.choice((130, 200, 400)), "page": random.choice((1, 4, 8))}
    how |= {"prefill": random.choice(("pass-kv", "pass-q", "auto")), "frozen": random.random() < 0.5}
    case = Case(random.randint(1, RANKS), changes, how, random.choice((3, 16, 50)))
    prompts: list[list[int]] = []
    for number in range(random.randint(4, 14)):
        begin = random.choice(prompts) if prompts and random.random() < 0.6 else []
        more = [random.randrange(1, VOCABULARY) for _ in range(random.choice((1, 2, 16, 30)))]
        prompts.append([*begin[: random.randint(0, len(begin))], *more][-70:])
        _add(random, case, f"{number}", prompts[-1])
    return case


def _add(random: Random, case: Case, name: str, prompt: list[int]) -> None:
    """A request, maybe with a twin, that arrives at some step and may be cancelled or handed over."""
    at, new = random.randint(0, 40), random.randint(1, 25)
    params = SamplingParams(
        temperature=random.choice((0.0, 0.0, 1.0)),
        top_p=0.0,
        top_k=random.choice((0, 0, 5)),
        num_tokens_to_generate=new,
        return_log_probs=True,
    )
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": min(new, 4)}
    rules = Rules(**penalties) if random.random() < 0.4 else Rules(ignore_ends=random.random() < 0.3)
    scored = random.random() < 0.15
    one = Request(name, prompt, params, random.randrange(1000), rules=rules, scored=scored)
    if random.random() < 0.2:
        one = replace(one, handoff=f"h{name}", scored=False, rules=Rules())
        case.released.setdefault(at + random.randint(0, 60), []).append(one.handoff)
    elif random.random() < 0.3:
        case.arriving.setdefault(at, []).append(replace(one, name=f"{name}b", seed=one.seed + 1, twin=name))
    case.arriving.setdefault(at, []).insert(0, one)
    if random.random() < 0.15 and not one.handoff:
        case.cancelled.setdefault(at + random.randint(0, 20), []).append(name)


# ------------------------------------------------------------------------------------------------ on the ranks


def _engine(case: Case) -> Engine:
    start()
    of = session(changes=case.changes, **case.how)
    handed = HandedSequences(of.tables, of.cache, of.cp.rank)
    return Engine(of, Letters(), case.chunks, 160, of.tables.n * of.tables.page, handed)


def together(case: Case) -> Found:
    """All requests in one engine."""
    loop, found = RankLoop(engine := _engine(case)), Found({}, {}, {}, {})
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
        for output in loop._step(arrived):
            _note(found, output)
        poison(engine.cache)
    _empty(engine)
    assert not engine.running and not engine.waiting, "requests are left"
    assert engine.cache.room() == engine.capacity, "pages are left"
    parallel_state.destroy_model_parallel()
    return found


def _release(engine: Engine) -> None:
    """End the handoffs whose prefill began too late for their release."""
    for name in [*engine.pinned]:
        engine.release(name)


def _note(found: Found, output) -> None:
    name = output.request
    found.tokens.setdefault(name, []).extend((token.id, token.logprob) for token in output.tokens)
    if output.prompt:
        found.scores[name] = [token.logprob for token in output.prompt]
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
    found = Found({}, {}, {}, {})
    engine = _engine(replace(case, how=case.how | {"cache_tokens": 800, "prefill": "pass-kv"}, chunks=500))
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
    (expected,) = ranks(1, alone, case)
    of_ranks = ranks(case.ranks, together, case)
    for found in of_ranks:
        assert found.tokens == of_ranks[0].tokens and found.finish == of_ranks[0].finish, "ranks have other texts"
    found, cancelled = of_ranks[0], {name for names in case.cancelled.values() for name in names}
    requests = [one for requests in case.arriving.values() for one in requests]
    for request in requests:
        name, tokens = request.name, found.tokens.get(request.name, [])
        wanted = expected.tokens.get(name, [])
        if name in cancelled and found.finish.get(name) == "cancelled":
            wanted = wanted[: len(tokens)]
        else:
            assert found.finish.get(name) == expected.finish[name], f"{name} ends with {found.finish.get(name)}"
        assert [token for token, _ in tokens] == [token for token, _ in wanted], f"{name}: {tokens}, not {wanted}"
        _close(name, [logprob for _, logprob in tokens], [logprob for _, logprob in wanted])
        if name in found.scores:
            _close(f"prompt of {name}", found.scores[name], expected.scores[name])
        if request.handoff in found.rows:
            rows = [pair for of in of_ranks for pair in of.rows[request.handoff].items()]
            whole = expected.rows[request.handoff]
            assert sorted(position for position, _ in rows) == [*range(len(request.tokens))], f"rows of {name}"
            for position, row in rows:
                assert (row - whole[position]).abs().max() < CLOSE, f"row {position} of {name}"
    return sum(map(len, found.tokens.values()))


def _close(what: str, numbers: list[float], wanted: list[float]) -> None:
    apart = [abs(one - other) for one, other in zip(numbers, wanted, strict=True)]
    assert all(distance < CLOSE for distance in apart), f"{what}: log-probabilities {max(apart):.1e} apart"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--only", type=int, help="only the engine of this number")
    args = parser.parse_args()
    ranks, counts, number = Ranks(RANKS), Counter[str](), args.only or 0
    until = time.monotonic() + args.seconds
    while time.monotonic() < until:
        case = draw(Random(f"{args.seed} {number}"))
        try:
            counts["tokens"] += check(ranks, case)
            counts["engines"] += 1
            counts["requests"] += sum(map(len, case.arriving.values()))
            counts["handoffs"] += sum(map(len, case.released.values()))
        except AssertionError as error:
            counts["failed"] += 1
            print(f"--seed {args.seed} --only {number}: {error}: {case}", flush=True)
        number += 1
        if args.only is not None:
            break
    ranks.close()
    print(", ".join(f"{counts[name]} {name}" for name in ("engines", "requests", "handoffs", "tokens", "failed")))
    return int(counts["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
