"""The table of saved bytes against what autograd and checkpoints of megatron-core's layers really keep on a CPU."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from megatron.context_parallel.cluster.step import saved_bytes
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from megatron.context_parallel.trainer import training
from megatron.context_parallel.trainer.config.workload import model_of, run_of
from tests.support import training_case
from tests.support.ideal_model import MODEL
from tests.support.saved_tensors import Listing

SIZES = {"hidden_size": 40, "kv_channels": 12, "ffn_hidden_size": 52}
EXPERTS = {"num_experts": 6, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
WHITELIST = FULL | {"recompute_whitelist": ["core_attention"]}
ALL_KEPT = FULL | {"recompute_whitelist": ["core_attention", "qkv", "proj", "fc1", "fc2", "norms"]}


def selective(*modules: str) -> dict:
    return PLAIN | {"recompute_granularity": "selective", "recompute_modules": [*modules]}


PLAIN = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
CORE = selective("core_attn", "layernorm")
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
ULYSSES = {"cp_strategy": "ulysses", "num_query_groups": 1}  # a key/value head for each of two ranks: replicas
ROUNDS = {"cp_strategy": "ulysses:head_rounds=2"}
MODELS = {"gpt": ("gpt3", {}), "llama": ("llama", {}), "moe": ("llama", EXPERTS)}
OTHERS = [
    PLAIN | {"qk_layernorm": True, "mlp_chunks_for_training": 4},
    PLAIN | BF16 | {"qk_layernorm": True, "cross_entropy_chunk_size": 10},
    PLAIN | ULYSSES,
    selective("mlp"),
    selective("mlp", "layernorm"),
    CORE | ULYSSES | {"qk_layernorm": True},
    CORE | BF16 | {"qk_layernorm": True},
    WHITELIST | ULYSSES,
    ALL_KEPT | BF16 | {"qk_layernorm": True},
    PLAIN | ROUNDS,
    WHITELIST | ROUNDS,
]
EACH = [recompute | dtype for recompute, dtype in product((PLAIN, FULL, ALL_KEPT, CORE), ({}, BF16))]
MORE = {
    "gpt": [CORE | {"qk_layernorm": True}],
    "llama": [],
    "moe": [EXPERTS | selective("moe", "layernorm"), EXPERTS | BF16 | selective("shared_experts", "core_attn")],
}


def kept(family: str, changes: dict) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by part of a micro batch on this rank: listed, and those of the table."""
    args = training_case.case_args(family, use_distributed_optimizer=False, **SIZES, **changes)
    with training_case.groups(args):
        (model,) = training_case.build(args).model
        listing = Listing(model)
        with listing.running():
            out, _ = training._forward_step(args, training_case.batches(args, 0), model)
        listing.add_objects(out)
        training_case.forget_graphs([model])
    return {name: size for name, size in listing.bytes.items() if size and "embeddings" not in name}, table(args)


def table(args) -> dict[str, int]:
    model, run = model_of(args), run_of(args)
    found = Counter[str]()
    full = args.recompute_granularity == "full"
    if full:
        parts = saved_bytes.checkpoint_parts(model, run, args.num_layers)
        parts += args.num_layers * saved_bytes.kept_parts(model, run)
    else:
        layer = saved_bytes.attention_parts(model, run) + saved_bytes.mlp_parts(model, run)
        parts = [*layer * args.num_layers, saved_bytes.selective_states(run, args.num_layers)]
    for name, size in parts + saved_bytes.output_parts(model, run):
        found[name] += size
    rotary = saved_bytes.rotary_tables(model, run)
    angles = 4 * run.tokens // run.micro_batch_size * model.kv_channels * (rotary > 0)
    found["self_attention"] += 0 if full else rotary - angles  # cos and sin
    found["decoder"] += angles if full else 0
    return {name: size for name, size in found.items() if size}


def all_kept(family: str, cases: list[dict]) -> list[tuple[dict, dict]]:
    return [kept(family, changes) for changes in cases]


@pytest.mark.parametrize(
    ("name", "ranks_of_a_sequence"), [("llama", 2), *[(name, 1) for name in MODELS if name != "llama"]]
)
def test_the_table_is_that_of_a_listing(ranks, name, ranks_of_a_sequence):
    family, changes = MODELS[name]
    each = EACH if name == "llama" else EACH[::4] + EACH[3::4]  # each kind once, both dtypes
    cases = [changes | case for case in each] + MORE[name]
    if name == "llama" and ranks_of_a_sequence > 1:
        cases += OTHERS
    if ranks_of_a_sequence > 1:
        cases = [{**case, "context_parallel_size": 2} for case in cases]
    (found, *_) = ranks(ranks_of_a_sequence, all_kept, family, cases)
    for case, (listed, expected) in zip(cases, found, strict=True):
        if case.get("cross_entropy_chunk_size"):  # the logits of a chunk are freed with its gradients
            assert listed.pop("loss") + listed.pop("output_layer") > expected.pop("loss")
        assert listed == expected, case


@pytest.mark.parametrize(("swiglu", "biases", "vectors"), [(True, False, 2), (True, True, 5), (False, True, 2)])
def test_experts_without_a_fused_kernel_keep_more_on_a_gpu(swiglu, biases, vectors):
    """Of the activation, and of its result before it is multiplied by the probability."""
    wide, wider = (
        replace(MODEL, num_experts=4, moe_ffn_hidden_size=width, swiglu=swiglu, add_bias_linear=biases)
        for width in (100, 101)
    )
    run = TrainConfig(seq_length=64, dtype="bf16", implementation="fused")
    kept = [{part.name: part.bytes for part in saved_bytes.mlp_parts(model, run)}["experts"] for model in (wide, wider)]
    assert kept[1] - kept[0] == 64 * 2 * wide.moe_router_topk * vectors
