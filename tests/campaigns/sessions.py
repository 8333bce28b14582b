"""Random models and caches, and random lives of sequences in them: the logits of whole texts on the fewest ranks.

    python -m tests.campaigns.sessions --seconds 60 --seed 1

A session opens, forks, trims and frees sequences, and appends prompts, parts of prompts and single tokens. Free pages
are full of NaN. All logits are compared with a forward pass over the whole text without a cache. Some caches are too
small: then a pass is refused on all ranks, and changes nothing. Each failure prints the number that runs it again
(`--only`). The exit status is 1 if there is one.
"""

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.inference.pages import CacheFull
from megatron.context_parallel.kernels.names import KV_CACHE_DTYPES
from megatron.context_parallel.trainer.model.build import _quick_gelu as quick_gelu
from tests.support.device import HEAD_DIMS
from tests.support.numbered_cases import numbered, read_flags
from tests.support.ranks import Ranks
from tests.support.session_case import VOCABULARY, model, poison, session, start

RANKS = 6
BOUNDS = {"auto": 2e-5, "int8": 0.2, "fp8": 0.5}  # of the relative error of a row of logits, by kv_cache_dtype
SHORT = 0.2  # more, in bfloat16
WIDE = 0.5  # more, with keys and values in 8 bits of heads of 64 and more, whose scores are larger
ROUTED = 2.0  # with keys and values in 8 bits, a token may be routed to another expert
APART = 0.05  # the same from one context rank, with keys and values in 8 bits: few numbers are rounded the other way
PREFILL = ("pass-kv", "pass-q", "pass-q-all-to-all", "empirical", "auto", "alg1", "alg5")
LONGEST = 200  # tokens of a sequence
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "tanh gelu": partial(F.gelu, approximate="tanh"), "quick": quick_gelu}
Passes = list[dict[int, list[tuple[list[int], Tensor]]]]  # for each pass and sequence some positions and their logits


@dataclass
class Append:
    """A pass: new tokens by sequence, which tensors are sent, and the sequences whose logits are all kept."""

    new: dict[int, list[int]]
    prefill: str | None
    scored: list[int]


@dataclass
class Case:
    """A session and what happens to its sequences, which are numbered from 1.

    Attributes:
        tensor, context: the tensor- and context-parallel ranks.
        positions: of the tokens, "rope", "yarn" or "learned_absolute"; changes: of the model's configuration;
            model_args: other arguments of the model; how: of the session.
        events: passes, and ("open",), ("fork", sequence, tokens), ("free", sequence) and ("trim", sequence).
    """

    tensor: int
    context: int
    positions: str
    changes: dict[str, Any]
    how: dict[str, Any]
    events: list[Append | tuple] = field(default_factory=list)
    model_args: dict[str, Any] = field(default_factory=dict)


def draw(random: Random) -> Case:
    tensor = random.choice((1, 1, 1, 2, 4))
    context = random.randint(1, RANKS // tensor)
    positions = random.choice(("rope", "rope", "rope", "yarn", "learned_absolute"))
    case = Case(tensor, context, positions, _changes(random, tensor), {})
    _rotate_otherwise(random, case)
    case.how |= {"cache_tokens": random.choice((100, 250, 800, 800)), "frozen": random.random() < 0.5}
    case.how |= {"page": random.choice((1, 2, 4, 8, 16, 64)), "cluster": random.choice((None, "gti", "dgx-h100"))}
    if case.how["cluster"] is None:
        case.how.pop("cluster")
    rules = PREFILL if "cluster" in case.how else PREFILL[:5]
    case.how |= {"prefill": random.choice(rules), "kv_cache_dtype": random.choice(("auto", *KV_CACHE_DTYPES))}
    texts: dict[int, int] = {}  # tokens by sequence
    for _ in range(random.randint(5, 14)):
        case.events.append(_event(random, texts, 1 + sum(event[0] in ("open", "fork") for event in _calls(case))))
    return case


def _calls(case: Case) -> list[tuple]:
    return [event for event in case.events if isinstance(event, tuple)]


def _changes(random: Random, tensor: int) -> dict[str, Any]:
    """Of a model; experts only without tensor parallelism, with which they need sequence parallelism."""
    changes: dict[str, Any] = {"num_query_groups": random.choice((1, 2, 4)), "num_layers": random.randint(1, 3)}
    if random.random() < 0.5:
        changes["window_size"] = random.choice((0, 1, 3, 6, 11)), 0
        by_layer = [random.randint(0, 1) for _ in range(changes["num_layers"])]
        changes["window_attn_skip_freq"] = random.choice((None, 2, 3, by_layer))
    changes["softmax_type"] = random.choice(("vanilla", "vanilla", "off-by-one", "learnable"))
    changes["qk_layernorm"] = random.random() < 0.3
    changes["normalization"] = random.choice(("RMSNorm", "LayerNorm"))
    changes["gated_linear_unit"] = random.random() < 0.5
    changes["activation_func"] = random.choice(sorted(ACTIVATIONS))
    changes["kv_channels"] = random.choice(HEAD_DIMS)
    changes["add_bias_linear"] = random.random() < 0.4
    changes["add_qkv_bias"] = random.random() < 0.3
    changes["softmax_scale"] = random.choice((None, None, 0.2))
    changes["params_dtype"] = random.choice((torch.float32,) * 6 + (torch.bfloat16,))
    for name in ("layernorm_zero_centered_gamma", "sandwich_norm", "scale_embeddings"):
        changes[name] = random.random() < 0.2
    if changes["gated_linear_unit"] and changes["activation_func"] == "quick":
        changes |= {"glu_linear_offset": random.choice((0.0, 1.0))}
        changes |= {"activation_func_clamp_value": random.choice((None, 1.0))}
    if tensor == 1 and random.random() < 0.2:
        changes |= {"num_moe_experts": 4, "moe_router_topk": random.choice((1, 2)), "moe_router_pre_softmax": True}
        if random.random() < 0.5:
            changes["moe_shared_expert_intermediate_size"], changes["add_bias_linear"] = 24, False
    return changes


def _rotate_otherwise(random: Random, case: Case) -> None:
    """Perhaps other rotary angles, and weights of the output that are those of the embedding."""
    case.model_args["share_embeddings_and_output_weights"] = random.random() < 0.3
    if case.positions == "learned_absolute":
        return
    case.model_args["rotary_percent"] = random.choice((1.0, 1.0, 0.5))
    case.changes["rotary_interleaved"] = random.random() < 0.15
    if case.positions == "yarn":
        case.changes |= {"yarn_rotary_scaling_factor": 4.0, "yarn_mscale": random.choice((1.0, 0.5))}
        return
    case.model_args["rope_scaling"] = random.random() < 0.2
    case.model_args["seq_len_interpolation_factor"] = random.choice((None, None, 4.0))
    if "window_size" in case.changes and random.random() < 0.4:
        case.changes["rotary_base_of_windows"] = 50


def _event(random: Random, texts: dict[int, int], number: int) -> Append | tuple:
    """What happens next; `texts` is changed. `number` is that of the next sequence."""
    filled = [sequence for sequence, tokens in texts.items() if tokens]
    chance = random.random()
    if not texts or (chance < 0.25 and len(texts) < 5):
        texts[number] = 0
        return ("open",)
    if chance < 0.35 and filled:
        source = random.choice(filled)
        texts[number] = random.randint(1, texts[source])
        return "fork", source, texts[number]
    if chance < 0.42 and len(texts) > 1:
        texts.pop(gone := random.choice([*texts]))
        return "free", gone
    if chance < 0.48 and filled:
        return "trim", random.choice(filled)
    decode = random.random() < 0.5
    new = {}
    for sequence in random.sample([*texts], random.randint(1, len(texts))):
        count = 1 if decode and texts[sequence] else random.choice((1, 2, 3, 7, random.randint(1, 40)))
        new[sequence] = [random.randrange(VOCABULARY) for _ in range(min(count, LONGEST - texts[sequence]))]
        texts[sequence] += len(new[sequence])
    new = {sequence: tokens for sequence, tokens in new.items() if tokens}
    if not new:
        return "trim", next(iter(texts))
    return Append(new, random.choice((None, *PREFILL[:3])), [s for s in new if random.random() < 0.3])


# ------------------------------------------------------------------------------------------------ on the ranks


def _of_model(case: Case) -> dict[str, Any]:
    more = {"model_args": case.model_args, "uneven": True}
    return case.changes | more | {"activation_func": ACTIVATIONS[case.changes["activation_func"]]}


def live(case: Case) -> list[dict | None]:
    """What this rank has of each pass; None for one that the cache refused."""
    start(case.tensor)
    how = dict(case.how)
    if "cluster" in how:
        how["cluster"] = load_cluster(how["cluster"])
    of, found = session(case.positions, changes=_of_model(case), **how), []
    for event in case.events:
        match event:
            case Append(new, prefill, scored):
                try:
                    found.append(_append(of, new, prefill, scored))
                except CacheFull:
                    found.append(None)
            case ("open",):
                of.open()
            case ("fork", source, tokens):
                if of.length(source) < tokens or not of.holds(source, tokens):  # a pass was refused; it was trimmed
                    break
                try:
                    of.fork(source, tokens)
                except CacheFull:
                    break
            case ("free", sequence):
                of.free(sequence)
            case ("trim", sequence) if of.window is not None:
                of.trim(sequence)
        poison(of)
    parallel_state.destroy_model_parallel()
    return found


def _append(of, new, prefill, scored) -> dict[int, list[tuple[list[int], Tensor]]]:
    rows = defaultdict(list)
    for sequence, logits in of.forward(new, prefill, scored).items():
        rows[sequence].append(([of.length(sequence) - 1], logits.unsqueeze(0).clone()))
    for sequence, (positions, logits) in of.scored.items():
        rows[sequence].append((positions, logits.clone()))
    return dict(rows)


@torch.no_grad()
def whole(case: Case, refused: list[int]) -> list[dict[int, Tensor]]:
    """For each pass and sequence the logits of the whole text [tokens, vocabulary], without a cache.

    Passes with the numbers in `refused` did not take place.
    """
    start(case.tensor)
    built, texts, found = model(True, case.positions, **_of_model(case)).eval(), dict[int, list[int]](), []
    for event in case.events:
        match event:
            case ("open",):
                texts[len(texts) + 1] = []
            case ("fork", source, tokens):
                texts[len(texts) + 1] = texts[source][:tokens]
            case Append() if len(found) in refused:
                found.append({})
            case Append(new):
                for sequence, tokens in new.items():
                    texts[sequence] = texts[sequence] + tokens
                found.append({sequence: _logits(built, texts[sequence]) for sequence in new})
    parallel_state.destroy_model_parallel()
    return found


def _logits(built, text: list[int]) -> Tensor:
    device = next(built.parameters()).device
    padded = torch.tensor([text + [0] * (len(text) % 2)], device=device)  # the zigzag layout needs an even length
    logits = built(padded, torch.arange(padded.shape[1], device=device).unsqueeze(0), None, runtime_gather_output=True)
    return logits[0, : len(text), :VOCABULARY].float()


# ------------------------------------------------------------------------------------------------ the comparison


def check(ranks: Ranks, case: Case) -> tuple[float, float, int]:
    """The largest relative error of a row of logits, the largest difference from one context rank with keys in 8 bits,
    and how many rows were compared.

    Raises:
        AssertionError: logits are missing, or ranks have too many.
    """
    of_ranks, refused = _passes(ranks(case.tensor * case.context, live, case))
    expected = ranks(case.tensor, whole, case, refused)[0]
    error, count = largest_error(of_ranks, expected)
    passes = [event for event in case.events if isinstance(event, Append)]
    for number, at_once in enumerate(zip(*of_ranks, strict=True)):
        rows = Counter[int]()
        for sequence, parts in [part for of_rank in at_once for part in of_rank.items()]:
            rows[sequence] += sum(len(positions) for positions, _ in parts)
        new, scored = ({}, []) if number in refused else (passes[number].new, passes[number].scored)
        due = {s: case.tensor * (1 + len(new[s]) * (s in scored)) for s in new}
        assert rows == due, f"pass {number} has {dict(rows)} rows of logits, not {due}"
    if case.how["kv_cache_dtype"] == "auto" or case.context == 1 or refused:
        return error, 0.0, count
    alone = _passes(ranks(case.tensor, live, replace(case, context=1)))[0][0]
    for number, at_once in enumerate(alone[: len(of_ranks[0])]):
        for sequence, parts in at_once.items():
            for positions, logits in parts:
                expected[number][sequence][positions] = logits
    return error, largest_error([of_rank[: len(alone)] for of_rank in of_ranks], expected)[0], count


def _passes(of_ranks: list[list]) -> tuple[list[Passes], list[int]]:
    """The passes of each rank, and the numbers of those that all ranks refused: they are empty."""
    refused = [[number for number, rows in enumerate(of_rank) if rows is None] for of_rank in of_ranks]
    assert all(numbers == refused[0] for numbers in refused), f"ranks refused the passes {refused}"
    return [[rows or {} for rows in of_rank] for of_rank in of_ranks], refused[0]


def largest_error(of_ranks: list[Passes], expected: list[dict[int, Tensor]]) -> tuple[float, int]:
    """The largest relative error of a row of logits, and how many there are."""
    worst, count = 0.0, 0
    for of_rank in of_ranks:
        for at_once, wanted in zip(of_rank, expected, strict=False):  # it may have ended early
            for sequence, parts in at_once.items():
                for positions, logits in parts:
                    exact = wanted[sequence][positions]
                    errors = (logits - exact).norm(dim=1) / exact.norm(dim=1)
                    worst = max([worst, *errors.nan_to_num(torch.inf).tolist()])
                    count += len(positions)
    return worst, count


def too_far(case: Case, error: float, apart: float) -> bool:
    """Whether an error is larger than rounding makes it, from the whole texts or from one context rank."""
    form, short = case.how["kv_cache_dtype"], SHORT * (case.changes["params_dtype"] is torch.bfloat16)
    wide = WIDE * (form != "auto" and case.changes["kv_channels"] >= 64)
    routed = "num_moe_experts" in case.changes and (form != "auto" or short)
    return error > (ROUTED if routed else BOUNDS[form] + short + wide) or apart > (
        ROUTED if short and routed else APART + short
    )


def main() -> int:
    args = read_flags(__doc__.splitlines()[0], "session")
    ranks, largest, most_apart, rows, failed = Ranks(RANKS), Counter[str](), 0.0, 0, 0
    sessions = 0
    for again, random in numbered(args):
        case = draw(random)
        sessions += 1
        form = case.how["kv_cache_dtype"]
        try:
            error, apart, count = check(ranks, case)
            wrong = f"off by {error:.1e}, {apart:.1e} from one rank" if too_far(case, error, apart) else ""
            form = form if case.changes["params_dtype"] is torch.float32 else f"{form} of bfloat16"
            largest[form], rows = max(largest[form], error), rows + count
            most_apart = max(most_apart, apart) if "bfloat16" not in form else most_apart
        except Exception as error:
            wrong = str(error)
        if wrong:
            failed += 1
            print(f"{again}: {wrong}: {case}", flush=True)
    ranks.close()
    errors = ", ".join(f"{form} {error:.1e}" for form, error in sorted(largest.items()))
    print(f"{sessions} sessions, {rows} rows of logits, {failed} failed")
    print(f"largest errors: {errors}; in 8 bits from one rank {most_apart:.1e}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
