"""A model over the shared cache gives the tokens that it gives when it computes everything from the start."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel import UsageError
from megatron.context_parallel.inference.pages import CacheFull
from megatron.context_parallel.inference.recordings import OFTEN
from megatron.context_parallel.inference.session import Session
from tests.support.session_case import (
    VOCABULARY,
    greedy,
    greedy_from_the_start,
    model,
    next_token,
    poison,
    session,
    start,
)

TURNS = [[13, 1, 30, 6], [5, 2, 0, 17], [1, 9, 3, 1]]  # new tokens of each sequence, by turn
SHORT = [[11, 2], [3, 1]]
STEPS = 5


def _one_rank() -> list[list[list[int]]]:
    start()
    return [greedy_from_the_start(TURNS, STEPS), greedy(session(), TURNS, STEPS, chunk=7)]


@pytest.fixture(scope="module")
def expected(ranks):
    return ranks(1, _one_rank)[0]


def test_one_rank(expected):
    from_the_start, over_the_cache = expected
    assert over_the_cache == from_the_start
    assert (
        len({token for text in from_the_start for token in text}) > VOCABULARY // 2
    )  # more than a few tokens again and again


def _over_the_cache(how: list[dict]) -> list:
    start()
    return [greedy(session(prefill=case.pop("prefill", "auto")), TURNS, STEPS, **case) for case in how]


CHUNKED = {"chunk": 4, "variants": ("pass-kv", "pass-q", "auto")}


@pytest.mark.parametrize(
    "n,how", [(2, [CHUNKED]), (3, [{"prefill": "pass-kv"}, {"prefill": "pass-q"}]), (4, [CHUNKED])]
)
def test_greedy_tokens(ranks, expected, n, how):
    """Whole prompts by each variant, and prompts in chunks whose variants take turns."""
    for texts in ranks(n, _over_the_cache, how):
        assert texts == [expected[0]] * len(how)


def _kinds(tensor: int, positions: str, changes: dict) -> None:
    start(tensor)
    expected = greedy_from_the_start(SHORT, 3, positions, **changes)
    for prefill in ("pass-kv", "pass-q"):
        assert greedy(session(positions, changes=changes, prefill=prefill), SHORT, 3) == expected


@pytest.mark.parametrize(
    "n,tensor,positions,changes",
    [
        (4, 2, "rope", {"num_query_groups": 1}),  # both tensor-parallel ranks have the one key/value head
        (3, 1, "learned_absolute", {"num_query_groups": 4, "window_size": (6, 0), "softmax_type": "off-by-one"}),
    ],
    ids=["tensor parallel", "learned positions, window and sinks"],
)
def test_models(ranks, n, tensor, positions, changes):
    ranks(n, _kinds, tensor, positions, changes)


def _life() -> None:
    """Sequences that join, fork and leave, the logits of each pass against those from the start."""
    of, whole, texts = session(cache_tokens=160), model(False).eval(), dict[int, list[int]]()

    def go(new: dict[int, list[int]]) -> None:
        logits = of.forward(new)
        for sequence, tokens in new.items():
            texts[sequence] = texts.get(sequence, []) + tokens
        owners = of.share({sequence: [of.cp.rank + 1.0] for sequence in logits})
        for s, (owner,) in owners.items():
            assert len(texts[s]) - 1 in of.tables.positions(s, int(owner) - 1)
        for sequence, row in logits.items():
            token, expected = next_token(whole, texts[sequence])
            assert row.shape == (VOCABULARY,) and row.dtype == torch.float32
            assert int(row.argmax()) == token and (row - expected).norm() < 1e-5 * expected.norm()

    assert (of.open(), of.open()) == (1, 2)
    go({1: [*range(20)], 2: [3]})
    go({1: [7], 2: [*range(9, 28)]})
    assert of.fork(1, 15) == 3
    texts[3] = texts[1][:15]
    go({2: [5], 3: [1, 2, 3]})
    of.free(1)
    poison(of)
    assert of.open() == 4
    go({4: [*range(28)], 2: [8], 3: [4]})
    of.free(3)
    poison(of)
    go({4: [2, 6], 2: [9]})
    for sequence in (2, 4):
        of.free(sequence)
    assert of.room() == of.tables.capacity == 160 + (-160 % (4 * of.cp.n))


def _neighbours() -> list[torch.Tensor]:
    """Logits of a sequence in passes of equal shapes, beside sequences with other tokens."""
    found = list[dict[int, torch.Tensor]]()
    for shift in (0, 1):
        of = session(prefill="pass-kv")
        own, other = of.open(), of.open()
        for prompt, rest in ((14, 30), (1, 1), (3, 2)):
            mine = [(x * 5) % VOCABULARY for x in range(prompt)]
            logits = of.forward({own: mine, other: [(x + shift) % VOCABULARY for x in range(rest)]})
            found.append(logits)
    half = len(found) // 2
    for one, two in zip(found[:half], found[half:], strict=True):
        assert one.keys() == two.keys()
        for sequence in one:
            assert torch.equal(one[sequence], two[sequence]) == (sequence == 1)


def _refusals() -> None:
    of = session(cache_tokens=32)
    a, b = of.open(), of.open()
    wrong = [
        ({}, "forward of no sequences"),
        ({9: [1]}, "sequence 9: not open; give a number that open"),
        ({a: []}, f"sequence {a}: no new tokens"),
        ({a: [1, VOCABULARY]}, f"sequence {a}: token {VOCABULARY}; the vocabulary is 0 to {VOCABULARY - 1}"),
        ({a: [-1]}, f"sequence {a}: token -1"),
    ]
    for new, why in wrong:
        with pytest.raises(UsageError, match=why):
            of.forward(new)
    with pytest.raises(CacheFull, match=r"33 new tokens, but the cache has space for 32; .* --cache-tokens 40"):
        of.forward({b: [1] * 33})
    assert of.room() == 32 and of.length(b) == 0
    for call in (of.free, of.length, lambda number: of.fork(number, 0)):
        with pytest.raises(UsageError, match="sequence 7: not open"):
            call(7)
    with pytest.raises(UsageError, match="--cp-prefill best: unknown"):
        of.forward({a: [1, 2]}, prefill="best")
    for options, why in (({"prefill": "alg1"}, "--cp-prefill alg1: needs"), ({"cache_tokens": 0}, "--cache-tokens 0")):
        with pytest.raises(UsageError, match=why):
            Session(of.model, of.cp, **{"cache_tokens": 8, **options})
    for change, why in (
        ({"sequence_parallel": True}, "--sequence-parallel: not supported, ranks have any number of rows"),
        ({"num_layers": 3}, "our attention in all 3 layers"),
        ({"fp8": "hybrid"}, "--fp8-format hybrid"),
    ):
        with mock.patch.multiple(of.model.config, **change), pytest.raises(UsageError, match=why):
            Session(of.model, of.cp, cache_tokens=8)
    with mock.patch.object(of.model, "post_process", False), pytest.raises(UsageError, match="--pipeline-model-par"):
        Session(of.model, of.cp, cache_tokens=8)
    learned = session("learned_absolute", cache_tokens=512)
    with pytest.raises(UsageError, match="257 tokens; --max-position-embeddings 256 is the most"):
        learned.forward({learned.open(): [1] * 257})


def _a_model_stays_what_it_was() -> None:
    """A pass leaves the training state of the model unchanged (mode, hooks, positions) and keeps no gradients."""
    of = session()
    tokens = torch.arange(8).view(1, 8)[:, of.cp.positions(8)]
    before = of.model(tokens, tokens, None)
    of.model.train()
    logits = of.forward({of.open(): [1, 2, 3]})
    assert of.model.training and not any(row.requires_grad for row in logits.values())
    assert torch.equal(of.model(tokens, tokens, None), before)
    with mock.patch.object(of.model.decoder, "forward", side_effect=ValueError), pytest.raises(ValueError):
        of.forward({of.open(): [1]})
    assert torch.equal(of.model(tokens, tokens, None), before)
    dist.barrier()


def _recorded() -> None:
    """Decode steps that come often are recorded: the same bits, and what changes in the model counts."""
    start()
    changes = {"add_bias_linear": True, "normalization": "LayerNorm", "qk_layernorm": True}
    for positions, changed in (("rope", {}), ("learned_absolute", changes)):
        of, plain = session(positions, changes=changed), session(positions, changes=changed)
        plain._recordings = None
        sequences = [of.open(), of.open()], [plain.open(), plain.open()]
        weight = "decoder.layers.0.mlp.linear_fc1"
        for step_ in range(OFTEN + 8):
            if step_ == OFTEN + 2:
                for model_ in (of.model, plain.model):
                    model_.get_submodule(weight).weight.data.mul_(1.5)  # as an optimizer does
            if step_ == OFTEN + 4:
                (recorded,) = of._recordings.passes.values()
                assert recorded is of._recordings.passes[2] and recorded.current and recorded.checked
                for model_ in (of.model, plain.model):
                    layer = model_.get_submodule(weight)
                    layer.weight = torch.nn.Parameter(layer.weight * 0.5)  # another tensor
                assert not recorded.current
            tokens = [(step_ * 7 + 3) % VOCABULARY, (step_ * 5 + 1) % VOCABULARY]
            found = of.forward({s: [t] for s, t in zip(sequences[0], tokens, strict=True)})
            expected = plain.forward({s: [t] for s, t in zip(sequences[1], tokens, strict=True)})
            for one, two in zip(sequences[0], sequences[1], strict=True):
                assert torch.equal(found[one], expected[two]), (positions, step_)
        assert of._recordings.passes == {} and of._recordings.seen[2] == 4  # counted again


def test_decode_steps_are_recorded(ranks):
    ranks(1, _recorded)


def _two_ranks() -> None:
    start()
    _life()
    _neighbours()
    _refusals()
    _a_model_stays_what_it_was()


def test_lives_neighbours_and_refusals(ranks):
    ranks(2, _two_ranks)
