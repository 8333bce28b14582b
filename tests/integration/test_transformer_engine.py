"""Our attention where Transformer Engine is used: in megatron-core's layer spec, and as a DotProductAttention."""

import ast
import os
import re
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel import AllRanks, UsageError, context_parallel_attention
from megatron.context_parallel.integration.transformer_engine import DotProductAttention, why_not_importable
from megatron.context_parallel.tokens.layout import positions
from tests.support import training_case
from tests.support.transformer_engine_standin import standing_in

LENGTH, HEADS, KV_HEADS, WIDTH = 48, 4, 2, 8
STOP, END = 2, 4

# What MultiheadAttention hands over, by the release that first did so (the defaults of its own arguments).
CALLS = {
    "2.5": {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv", "attention_mask", "window_size", "alibi_slopes")),
        **dict.fromkeys(("core_attention_bias", "inference_params", "pad_between_seqs")),
        **{"qkv_format": "sbhd", "attn_mask_type": "causal", "checkpoint_core_attention": False},
        **{"core_attention_bias_type": "no_bias", "fast_zero_fill": True},
    }
}
CALLS["2.9"] = CALLS["2.5"] | {"fp8_output": False}
CALLS["2.14"] = CALLS["2.9"] | {"bottom_right_diagonal": None}
CALLS["2.20"] = CALLS["2.14"] | {"qkv_layer": None, "kv_layer": None, "qkv_interleave_dim": -3}
CALLS["2.20.2"] = CALLS["2.20"] | {
    "softcap": 0.0,
    "thd_attention_policies": None,
    "thd_attention_policy_dispatch": "auto",
}


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(LENGTH, 2, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def attend(strategy: str | None, comm_type: str, form: str, call: dict) -> torch.Tensor:
    """What the module computes for a whole sequence, gathered from all ranks."""
    module = DotProductAttention(HEADS, WIDTH, KV_HEADS, cp_strategy=strategy, layer_number=1)
    module.set_context_parallel_group(dist.group.WORLD, list(range(dist.get_world_size())), None, comm_type)
    q, k, v = (module.cp.shard(x) for x in tensors())
    if form == "bshd":
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = module(q, k, v, **{"qkv_format": form, **call})
    out = out if form == "sbhd" else out.transpose(0, 1)
    parts = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, out.contiguous())
    whole = torch.empty(LENGTH, *out.shape[1:])
    for rank, part in enumerate(parts):
        whole[positions(module.cp.layout, module.cp.chunks[rank], module.cp.n, LENGTH)] = part
    return whole


@pytest.mark.parametrize(
    ("strategy", "comm_type", "form", "call"),
    [
        ("mesh", "p2p", "sbhd", CALLS["2.20.2"]),
        (None, "p2p", "bshd", CALLS["2.5"] | {"qkv_format": "bshd"}),
        (None, "all_gather", "sbhd", {"attn_mask_type": "no_mask"}),
        (None, "a2a", "sbhd", {"window_size": (7, 0), "softcap": 0.3}),
    ],
)
def test_the_module_computes_exact_attention(ranks, strategy, comm_type, form, call):
    n = 2 if comm_type == "a2a" else 4
    causal, window = call.get("attn_mask_type") != "no_mask", call.get("window_size") or (-1, -1)
    q, k, v = (x.double() for x in tensors())
    softcap = call.get("softcap") or 0.0
    exact = context_parallel_attention(q, k, v, AllRanks(1), causal=causal, window=window, softcap=softcap).flatten(2)
    got = ranks(n, attend, strategy, comm_type, form, call)[0]
    assert (got - exact).norm() / exact.norm() < 1e-6


@pytest.mark.parametrize("dim", [-3, -2])
def test_queries_keys_and_values_may_be_packed(dim):
    """As Transformer Engine passes them from 2.19 on."""
    q, k, v = (torch.randn(LENGTH, 2, HEADS, WIDTH) for _ in range(3))
    module = DotProductAttention(HEADS, WIDTH)
    module.cp = AllRanks(1)
    packed = torch.stack((q, k, v), dim)
    call = CALLS["2.20.2"] | {"qkv_layer": packed, "qkv_interleave_dim": dim}
    assert torch.equal(module(None, None, None, **call), module(q, k, v))
    for wrong in ((q, k, v), (None, None, None)):
        with pytest.raises(
            UsageError, match="separate tensors: give query_layer, key_layer and value_layer, or only 3"
        ):
            module(*wrong, **call | ({} if wrong[0] is not None else {"qkv_layer": None}))


@pytest.mark.parametrize(("name", "own"), [("window_size", (7, 0)), ("softcap", 3.0), ("attn_mask_type", "no_mask")])
def test_a_layer_with_other_settings_is_refused(name, own):
    """Transformer Engine's layers pass theirs in each call: a window in all releases, a softcap from 2.20.2 on."""
    module = DotProductAttention(HEADS, WIDTH, KV_HEADS, **{name: own})
    module.cp = AllRanks(1)
    layers = {"attn_mask_type": "causal", "window_size": (-1, 0), "softcap": 0.0}
    with pytest.raises(UsageError, match=r"the module was created with .*; give both the same, or leave it out of the"):
        module(*tensors(), **layers)
    layers |= {"window_size": (-1, -1), name: own}
    assert torch.equal(module(*tensors(), **layers), module(*tensors()))


def test_attention_in_fp8_is_refused(monkeypatch):
    """Transformer Engine's layers do not tell a module of an MXFP8 recipe, so the module asks their state."""
    manager = SimpleNamespace(is_fp8_enabled=lambda: True, get_fp8_recipe=lambda: recipe)
    quantization = SimpleNamespace(FP8GlobalStateManager=manager)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.quantization", quantization)
    module = DotProductAttention(HEADS, WIDTH, KV_HEADS)
    module.cp = AllRanks(1)
    recipe = SimpleNamespace(fp8_dpa=False, fp8_mha=False)
    module(*tensors())
    recipe = SimpleNamespace(fp8_dpa=True, fp8_mha=False)
    with pytest.raises(UsageError, match=r"FP8 attention: not supported, .*; give fp8_dpa=False"):
        module(*tensors())


def functions(file: Path, name: str) -> dict[str, dict[str, object]]:
    """Methods of a class in a source: their parameters after `self` with literal defaults, and the others as "?"."""
    tree = ast.parse(file.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = {}
    for method in found.body:
        if isinstance(method, ast.FunctionDef):
            names = [argument.arg for argument in method.args.args]
            methods[method.name] = dict.fromkeys(names[1:], "?")
            for argument, default in zip(reversed(names), reversed(method.args.defaults), strict=False):
                methods[method.name][argument] = ast.literal_eval(default) if is_literal(default) else "?"
    return methods


def is_literal(node: ast.expr) -> bool:
    return isinstance(node, (ast.Constant, ast.UnaryOp))


def test_the_installed_release_is_taken_over():
    """Its arguments, read from its sources, because importing it may need a GPU.

    TRANSFORMER_ENGINE_PATH may name the folder transformer_engine of another release.
    """
    where = find_spec("transformer_engine")
    path = os.environ.get("TRANSFORMER_ENGINE_PATH") or (where and where.submodule_search_locations[0])
    if not path:
        pytest.skip("Transformer Engine is not installed, and TRANSFORMER_ENGINE_PATH names no folder of it")
    folder = Path(path, "pytorch", "attention")
    theirs = functions(folder / "dot_product_attention" / "dot_product_attention.py", "DotProductAttention")
    for name in ("__init__", "set_context_parallel_group"):
        assert theirs[name].keys() <= signature(getattr(DotProductAttention, name)).parameters.keys()
    given = {name: x for name, x in theirs["__init__"].items() if x != "?"}
    module = DotProductAttention(HEADS, WIDTH, **given | {"num_gqa_groups": KV_HEADS})
    module.cp = AllRanks(1)
    call = {name: x for name, x in theirs["forward"].items() if x != "?" and not name.endswith("_layer")}
    exact = context_parallel_attention(*tensors(), AllRanks(1)).flatten(2)
    assert torch.equal(module(*tensors(), **call), exact)
    source = (folder / "multi_head_attention.py").read_text()
    called = re.findall(r"^ {12}(\w+)=", source[source.index("= self.core_attention(") :].split("\n        )")[0], re.M)
    assert {"cu_seqlens_q", "inference_params"} < {*called} <= theirs["forward"].keys()


def test_what_would_change_the_result_is_refused():
    with pytest.raises(UsageError, match=r"attention_dropout 0.1: not supported; give 0"):
        DotProductAttention(HEADS, WIDTH, attention_dropout=0.1)
    with pytest.raises(UsageError, match="attention_type cross: not supported; give self"):
        DotProductAttention(HEADS, WIDTH, attention_type="cross")
    module = DotProductAttention(HEADS, WIDTH, KV_HEADS)
    with pytest.raises(UsageError, match="call set_context_parallel_group first"):
        module(*tensors())
    with pytest.raises(UsageError, match=r"cp_comm_type a2a\+p2p: give the whole group and cp_strategy"):
        module.set_context_parallel_group([None, None], [0, 1], None, "a2a+p2p")
    with pytest.raises(UsageError, match="cp_comm_type a2a: cannot be combined with cp_strategy ring"):
        DotProductAttention(HEADS, WIDTH, cp_strategy="ring").set_context_parallel_group(object(), [0], None, "a2a")
    with pytest.raises(UsageError, match="load_balancing_strategy no: not supported; give None"):
        module.set_context_parallel_group(object(), [0], None, "a2a", load_balancing_strategy="no")
    module.cp = AllRanks(2)
    q, k, v = tensors()
    with pytest.raises(UsageError, match="8 queries, 48 keys: caches are not supported"):
        module(q[:8], k, v)
    for wrong, message in (
        ({"qkv_format": "thd"}, "qkv_format thd: not supported; give sbhd or bshd"),
        ({"attn_mask_type": "padding_causal"}, "attn_mask_type padding_causal: not supported; give causal"),
        ({"attention_mask": torch.ones(2, 2)}, r"attention_mask a tensor \[2, 2\]: not supported"),
        ({"core_attention_bias_type": "alibi"}, "core_attention_bias_type alibi: not supported; give no_bias"),
        ({"checkpoint_core_attention": True}, "checkpoint_core_attention True: not supported"),
        ({"num_splits": 4}, "num_splits 4: not supported; give 1"),
        (
            {"attn_mask_type": "no_mask", "window_size": (-1, 0)},
            r"window_size \(-1, 0\) with no_mask: .* give \(-1, -1",
        ),
    ):
        with pytest.raises(UsageError, match=message):
            module(*tensors(), **wrong)
    with pytest.raises(UsageError, match=r"4 query and 4 key heads: the module was created for \(4, 2\)"):
        module(tensors()[0], tensors()[0], tensors()[0])


def test_a_model_that_asks_for_it_is_refused_where_it_is_missing(ranks):
    if not why_not_importable():
        pytest.skip("Transformer Engine is here")
    with pytest.raises(AssertionError, match="transformer_engine: it is not installed; give --transformer-impl local"):
        ranks(1, train, "transformer_engine", nullcontext)


def train(implementation: str, place=standing_in, **run):
    with place():
        return training_case.train("llama", transformer_impl=implementation, train_iters=END, **run).losses


def train_and_change(directory: str, first: str, then: str) -> tuple[list[float], list[float]]:
    """Losses of a run by megatron-core's own modules, and of one that changes to or from the stand-in at STOP."""
    whole = train("local")
    size = {"context_parallel_size": 2}
    start = train(first, save=directory, exit_interval=STOP, **size)
    return whole, start + train(then, save=directory, load=directory, **size)


@pytest.mark.parametrize(("first", "then"), [("local", "transformer_engine"), ("transformer_engine", "local")])
def test_checkpoints_load_across_the_two_specs(ranks, tmp_path, first, then):
    for whole, changed in ranks(2, train_and_change, str(tmp_path), first, then):
        assert changed == pytest.approx(whole, rel=1e-5)
