"""The calls of NCCL, made over gloo: their results are checked, and each call is recorded."""

from collections import Counter
from contextlib import ExitStack, contextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron.context_parallel import STRATEGIES, ContextParallel, context_parallel_attention
from megatron.context_parallel.patches import torch_process_groups
from megatron.context_parallel.runtime.comm import torch_works as works
from megatron.context_parallel.runtime.comm import transport
from megatron.context_parallel.runtime.comm.torch_works import post
from tests.support.as_nccl import as_nccl
from tests.support.exact import DIM, gradients

CASES = [  # with head counts and the layout
    ("allgather", {}, 4, 2),
    ("attention2d", {"overlap": False}, 4, 2),
    ("ulysses", {"layout": "contiguous"}, 4, 1),  # each rank gets a replica of the one key/value head
    ("usp", {"head_parallel_size": 2, "layout": "cyclic"}, 6, 2),
]


@contextmanager
def noted(calls: list):
    """Notes the name of each collective and batch of messages, and the shapes of tensors given."""

    def note(name, real):
        def call(*args, **how):
            shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
            calls.append((name, *shapes))
            return real(*args, **how)

        return call

    with ExitStack() as stack:
        for at, function, name in (
            (works, "all_gather_single", "gather"),
            (works, "reduce_scatter_single", "sum"),
            (dist, "all_to_all_single", "all to all"),
            (transport, "post", "messages"),
            (works, "as_one", "together"),
        ):
            stack.enter_context(patch.object(at, function, note(name, getattr(at, function))))
        yield


def results(cp: ContextParallel, heads: int, kv_heads: int, dtype: torch.dtype, **how: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    whole = [torch.randn(6 * cp.n, 1, h, DIM - 1).to(dtype) for h in (heads, kv_heads, kv_heads, heads)]
    return gradients(lambda *x: context_parallel_attention(*x, cp, return_lse=True, **how), *map(cp.shard, whole))


def _cases() -> list[tuple[list[float], list]]:
    found = []
    for name, options, *heads in CASES:
        plain, calls = ContextParallel(name, **options), []
        with as_nccl():
            cp = ContextParallel(name, **options)
        for dtype in (torch.bfloat16, torch.float32):  # odd head_dim: packed messages of both start at odd places
            calls.clear()
            expected = results(plain, *heads, dtype)
            with noted(calls):
                got = results(cp, *heads, dtype)
        errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected, strict=True)]
        found.append((errors, calls))
    return found


def _first_messages() -> set[str]:
    """The strategies whose passes send a message between two ranks that are not connected yet."""
    found = set()
    for name, narrow in product(STRATEGIES, (False, True)):
        options = {"head_parallel_size": 2} if name in ("usp", "loongtrain") else {}
        connected: set[tuple] = set()

        def noted(group, sends, receives, name=name, connected=connected):
            for way, peer, x in [("to", *sent) for sent in sends] + [("from", *received) for received in receives]:
                if x.dtype is torch.uint8 and x.numel() == 1:
                    connected.add((group, way, peer))
                elif (group, way, peer) not in connected:
                    found.add(name)
            return post(group, sends, receives)

        with patch.object(transport, "post", noted):
            with as_nccl():
                cp = ContextParallel(name, partials_in_16_bits=narrow, **options)
            for how in ({},) if narrow else ({}, {"causal": False}, {"window": (7, 0)}):
                results(cp, 4, 2, torch.bfloat16, **how)
            if not narrow:
                results(cp, 4, 1, torch.bfloat16)  # mesh has another default grid
    return found


def test_the_first_messages_connect_all_ranks_that_a_plan_connects(ranks):
    assert ranks(4, _first_messages) == [set()] * 4


def _narrow() -> tuple[bool, list[str]]:
    """Whether results with partials in 16 bits are those without NCCL, and the calls."""
    plain, calls = ContextParallel("allgather", partials_in_16_bits=True), []
    with as_nccl():
        cp = ContextParallel("allgather", partials_in_16_bits=True)
    with noted(calls):
        got = results(cp, 4, 2, torch.bfloat16)
    expected = results(plain, 4, 2, torch.bfloat16)
    return all(map(torch.equal, got, expected)), [name for name, *_ in calls]


def test_partials_in_16_bits_are_not_summed_by_nccl(ranks):
    """Its sums would be rounded on each rank; as messages each partial is rounded once."""
    gathers = ["together", "gather", "gather"]
    assert ranks(4, _narrow) == [(True, [*gathers, *gathers, "messages"])] * 4


def test_collectives_are_few_and_give_the_same(ranks):
    rows, width = 6, DIM - 1
    for allgather, attention2d, ulysses, usp in ranks(4, _cases):
        for errors, _ in (allgather, attention2d):
            assert max(errors) < 2e-6  # sums in another order
        for errors, _ in (ulysses, usp):
            assert max(errors) == 0

        kv, gathered = (rows, 2, width), (4 * rows, 2, width)
        both = [("together",), ("gather", gathered, kv), ("gather", gathered, kv)]  # K and V in one collective
        assert allgather[1] == [*both, *both, ("together",), *[("sum", kv, gathered)] * 2]

        counts = Counter(name for name, *_ in attention2d[1])
        # Both passes gather along rows and columns, and the backward pass sums DQ and DKV. Q; KV; QDO; KV: 9 tensors.
        assert (counts["together"], counts["gather"], counts["sum"]) == (6, 9, 3) and not counts["all to all"]
        assert next(call for call in attention2d[1] if call[0] == "sum") == (
            "sum", (rows, 2, 2, width), (2 * rows, 2, 2, width)
        )  # fmt: skip

        assert [name for name, *_ in ulysses[1]] == ["all to all"] * 4  # to heads and back, in each pass
        assert Counter(name for name, *_ in usp[1])["all to all"] == 4
        to_heads = ulysses[1][0]  # q, k and v for three ranks; each tensor takes a multiple of 16 bytes
        size = sum(-(-rows * heads * width * 4 // 16) * 16 for heads in (1, 1, 1))
        assert to_heads == ("all to all", (3, size), (3, size))


class NcclOptions:
    """As `torch.distributed.ProcessGroupNCCL.Options`, which a build for CPUs lacks."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace(max_ctas=None)


def test_communicators_have_the_priority_and_limits_of_their_group(monkeypatch):
    given = NcclOptions(True)
    given.config.max_ctas, given._timeout = 16, 7
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=NcclOptions), raising=False)
    for backends in ({"cuda": given}, {"cpu": object(), "cuda": given}):  # "nccl" and "cpu:gloo,cuda:nccl"
        own = torch_process_groups.options_of(group_of(backends))
        assert own is not given and own.is_high_priority_stream and (own.config.max_ctas, own._timeout) == (16, 7)
    assert torch_process_groups.options_of(group_of({"cpu": object()})) is None


def group_of(backends: dict[str, object]) -> Any:
    """A group with a backend for each device, which has these options."""
    made = {device: SimpleNamespace(options=options) for device, options in backends.items()}
    return SimpleNamespace(_device_types=list(made), _get_backend=made.get)
