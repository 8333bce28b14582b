"""A model over the shared cache gives the tokens that it gives when it computes everything from the start."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from megatron.context_parallel import ContextParallel, UsageError
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.inference.batch_layout import BatchLayout
from megatron.context_parallel.inference.cache_attention import CacheAttention
from megatron.context_parallel.inference.choose import PASS_KV, PASS_Q
from megatron.context_parallel.inference.decode_rows import DecodeRows
from megatron.context_parallel.inference.pages import CacheFull
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.patches.torch_cpu_attention import cpu_attention
from megatron.context_parallel.runtime.comm.host_sockets import HostSockets
from tests.support.nothing_new import NothingNew
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
    box = load_cluster("dgx-h100")  # here each node has the tensor-parallel ranks of one context rank, and one NIC
    cluster = replace(box, devices_per_node=tensor, nics=replace(box.nics, per_node=1))
    for prefill in ("pass-kv", "pass-q"):
        of = session(positions, changes=changes, prefill=prefill, cluster=cluster)
        assert of.rates.bandwidth == 50e9 / tensor
        assert greedy(of, SHORT, 3) == expected


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


def _window() -> None:
    """Pages outside the window are freed, filled with NaN, and used again; the text is that from the start."""
    changes = {"window_size": (6, 0), "num_query_groups": 4}
    of, whole = session(cache_tokens=48, changes=changes), model(False, num_query_groups=4).eval()
    assert of.window == 6 and session(changes=changes | {"window_attn_skip_freq": 2}).window is None
    sequence, text = of.open(), [*range(20)]
    new = [*text]
    for number in range(8):
        if number % 3 == 1:
            more = [(number * 7 + x) % VOCABULARY for x in range(12)]
            new, text = new + more, text + more
        logits = of.forward({sequence: new})
        chosen = of.share({s: [int(row.argmax())] for s, row in logits.items()})
        token, expected = next_token(whole, text, 6)
        assert int(chosen[sequence][0]) == token
        for row in logits.values():
            assert (row - expected).norm() < 1e-5 * expected.norm()
        new = [token]
        text.append(token)
        of.trim(sequence)
        poison(of)
        assert of.room() >= 48 - 6 - 2 * 4 * of.cp.n
    assert len(text) > 48 and of.fork(sequence, of.length(sequence))


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


def _ranks_are_alike() -> None:
    """Rank 0's choice holds where logarithms decide, and other settings than its own are refused."""
    of = session(cluster=load_cluster("gti"))
    expected = of.forward({of.open(): [*range(20)]}, prefill="pass-q")
    with mock.patch("megatron.context_parallel.inference.session.choose_prefill") as choose:
        choose.return_value = (PASS_KV, PASS_Q)[of.cp.rank > 0]
        for prefill in ("auto", "empirical"):
            found = of.forward({(sequence := of.open()): [*range(20)]}, prefill=prefill)
            assert of.variant == PASS_KV and len(found) == len(expected)
            for row, other in zip(found.values(), expected.values(), strict=True):
                torch.testing.assert_close(row, other, atol=1e-4, rtol=1e-4)
            of.free(sequence)
    for name, values in {
        "prefill": ("pass-kv", "pass-q"), "cache_tokens": (8, 64), "kv_cache_dtype": ("auto", "int8"),
        "constants": ((1.0, 1.0, 1.0), (2.0, 1.0, 1.0)), "page": (4, 8),
        "cluster": (load_cluster("gti"), load_cluster("dgx-h100")),
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=r"on rank 0 of the group, .* on rank 1; give all ranks the same"):
            Session(of.model, of.cp, **{"cache_tokens": 8, name: values[of.cp.rank == 1]})


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
        of.forward({of.open(): [1, 2]})
    assert torch.equal(of.model(tokens, tokens, None), before)
    dist.barrier()


def _steps_and_plans() -> None:
    """The attention of decode steps against that of the plan with the same messages, and what a step allocates."""
    sinks = {"num_query_groups": 4, "window_size": (6, 0), "softmax_type": "off-by-one"}
    for changes, kv_cache_dtype in (({}, "auto"), (sinks, "auto"), (sinks, "int8")):
        of = session(changes=changes, kv_cache_dtype=kv_cache_dtype)
        plan = ContextParallel(f"attention2d:grid=1x{of.cp.n},overlap=false", group=of.cp.group)
        core = of.model.decoder.layers[0].self_attention.core_attention
        for length in (13, 30, 5, 1, 2):
            of.forward({of.open(): [3] * length})
        for _ in range(3):
            new = {sequence: [1] for sequence in range(1, 6)}
            rows = DecodeRows(of.tables, new, of.tables.add(dict.fromkeys(new, 1)), of.cp.rank)
            batch = BatchLayout(of.tables, new, of.cp.rank, of.device)
            q, k, v = (torch.randn(rows.size, 1, heads, 8) for heads in (4, *[core.config.num_query_groups] * 2))
            attend = of._attention(rows.size)
            attend.begin(rows, rows.inputs[2])
            found = attend(core, q, k, v)
            given = max(1, batch.rows)
            expected = CacheAttention(batch, of.cache, plan)(core, q[:given], k[:given], v[:given])
            assert (found[: batch.rows] - expected[: batch.rows]).abs().sum() < 1e-5 and not found.isnan().any()
    of = session()
    sequences = [of.open() for _ in range(3)]
    of.forward({s: [s] * 9 for s in sequences})
    logits = of.forward({s: [s] for s in sequences})
    (step,) = of._steps.values()
    with torch.no_grad(), NothingNew(cpu_attention):  # it has no other form
        again = step.run()
        with pytest.raises(AssertionError, match=r"add\.Tensor makes a new tensor"):
            _ = again + 1
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            again[0, 0].item()
    for row, sequence in enumerate(logits):
        assert torch.equal(again[row, :VOCABULARY], logits[sequence])


KINDS = [
    ("rope", {}),
    ("rope", {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}),
    ("learned_absolute", {"add_bias_linear": True, "normalization": "LayerNorm", "qk_layernorm": True}),
    ("rope", {"add_bias_linear": True, "bias_activation_fusion": True}),
]
EAGER = torch.compiler.set_stance("force_eager")  # the fusion is compiled


@EAGER
def _plain_layers() -> None:
    """Steps without modules give the logits of steps with modules, also when weights change or are replaced."""
    start()
    for positions, changes in KINDS:
        of, with_modules = session(positions, changes=changes), session(positions, changes=changes)
        with_modules._layers = []
        sequences = [of.open(), of.open()], [with_modules.open(), with_modules.open()]
        for number in range(4):
            for changed in (of.model, with_modules.model):
                layer = changed.get_submodule("decoder.layers.0.mlp.linear_fc1")
                if number == 2:
                    layer.weight.data.mul_(1.5)  # as an optimizer does
                if number == 3:
                    layer.weight = torch.nn.Parameter(layer.weight * 0.5)
            tokens = [(number * 7 + 3) % VOCABULARY, (number * 5 + 1) % VOCABULARY]
            found = of.forward({s: [t] for s, t in zip(sequences[0], tokens, strict=True)})
            expected = with_modules.forward({s: [t] for s, t in zip(sequences[1], tokens, strict=True)})
            for row, other in zip(found.values(), expected.values(), strict=True):
                assert (row - other).norm() < 1e-6 * other.norm(), (positions, number)
        assert of._steps and not with_modules._steps
        half = model(True, positions, **changes).bfloat16()
        assert Session(half, half.context_parallel, cache_tokens=8)._layers  # compared when it starts


def test_steps_of_plain_layers(ranks):
    ranks(1, _plain_layers)


@EAGER
def _frozen() -> None:
    """Packed weights give the same logits, in prompts, in steps of all numbers of rows, and of ranks without rows."""
    start()
    for positions, changes in KINDS:
        of, packed = session(positions, changes=changes), session(positions, changes=changes, frozen=True)
        assert len(packed._packed) == 4 * len(packed._layers) + 1
        for count in (1, 2, 3, 8):
            for of_one in (of, packed):
                while len(of_one.tables._rank_rows) < count:
                    of_one.open()
            for length in (1, 3):
                new = {number: [number + count] * (length + number % length) for number in range(1, count + 1)}
                found, expected = (of_one.forward(new, scored=[1]) for of_one in (packed, of))
                assert found.keys() == expected.keys() and packed.scored.keys() == of.scored.keys()
                pairs = [(found[sequence], expected[sequence]) for sequence in found]
                for row, other in pairs + [(packed.scored[s][1], of.scored[s][1]) for s in of.scored]:
                    assert (row - other).norm() < 1e-5 * row.norm(), (positions, count, length)
    assert {size for size, step in packed._steps.items() if step._to_logits.packed} >= {3, 4} & packed._steps.keys()


def test_packed_weights(ranks):
    ranks(2, _frozen)


def _hooked() -> list[int]:
    """How many plain layers models in 16 bits have: one as it is, and some of which a part does a little more."""
    start()

    def scaled(module: torch.nn.Module, given: tuple, result: tuple) -> tuple:
        return 1.01 * result[0], result[1]

    def layers(change: Callable[[GPTModel], object]) -> int:
        of = model(True).bfloat16()
        change(of)
        return len(Session(of, of.context_parallel, cache_tokens=8)._layers)

    def replace(of: GPTModel) -> None:
        mlp = of.decoder.layers[1].mlp
        mlp.forward = partial(mlp.forward)

    return [
        layers(lambda of: None),
        layers(lambda of: of.decoder.layers[0].mlp.register_forward_hook(scaled)),
        layers(lambda of: of.embedding.word_embeddings.register_forward_pre_hook(lambda module, given: None)),
        layers(replace),
        layers(lambda of: of.output_layer.register_forward_hook(lambda *given: (1.2 * given[2][0], None))),
    ]


def test_a_model_with_hooks_calls_its_modules(ranks):
    assert ranks(1, _hooked) == [[2, 0, 0, 0, 0]]


def _two_ranks() -> None:
    start()
    _steps_and_plans()
    with mock.patch.object(HostSockets, "connect", lambda group: None):  # as on several hosts
        _steps_and_plans()
    _life()
    _window()
    _neighbours()
    _refusals()
    _a_model_stays_what_it_was()
    _ranks_are_alike()


def test_lives_neighbours_and_refusals(ranks):
    ranks(2, _two_ranks)
