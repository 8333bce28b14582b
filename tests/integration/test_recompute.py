"""What recomputation computes again, keeps and offloads: the same gradients, bit for bit, in less memory."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron.context_parallel.kernels.aten import AtenFlash
from tests.support import training_case

TOKENS = 2 * training_case.SEQUENCE  # of a micro batch
LAYERS = 3, 5
HIDDEN, FFN, HEADS, QKV = 32, 48, 4, 64  # of the case's model, whose queries are as wide as it, and keys half of it
RANDOM_STATE = 2 * 5056 / 4 / TOKENS  # of two generators, which each of Megatron's checkpoints keeps
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}
Gradients = dict[str, torch.Tensor]


def step(family: str, changes: dict) -> tuple[Gradients, int]:
    """The gradients of one micro batch, by weight, and the most bytes that the allocator had given at once."""
    args = training_case.case_args(family, use_distributed_optimizer=False, **changes)
    with training_case.groups(args):
        chunks = training_case.build(args).model
        data = [training_case.batches(args, 0)]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            training_case.training.run_micro_batches(args, chunks, data, args.micro_batch_size, forward_only=False)
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        found = {name: weight.main_grad.clone() for name, weight in chunks[0].module.named_parameters()}
        training_case.forget_graphs(chunks)
        return found, most


def steps(family: str, cases: dict[str, dict]) -> dict[str, tuple[Gradients, float]]:
    """By case: the gradients, and the values of 4 bytes that a further layer takes at the peak, for a token."""
    found = {}
    for name, changes in cases.items():
        runs = [step(family, {"num_layers": layers, **changes}) for layers in LAYERS]
        (_, few), (gradients, many) = runs
        found[name] = gradients, (many - few) / (LAYERS[1] - LAYERS[0]) / TOKENS / 4
    return found


def check_gradients(found: dict[str, tuple[Gradients, float]], expected: str) -> None:
    for name, (gradients, _) in found.items():
        for weight, gradient in found[expected][0].items():
            assert torch.equal(gradients[weight], gradient), f"{name}: {weight}"


def selective(*modules: str) -> dict:
    return {"recompute_granularity": "selective", "recompute_modules": [*modules]}


@pytest.mark.parametrize("family", ["llama", "gpt3"])
def test_selective_recomputation_changes_no_gradient_and_frees_what_it_computes_again(ranks, family):
    modules = ("core_attn", "mlp", "layernorm")
    cases = {"none": {}, "all": selective(*modules), **{module: selective(module) for module in modules}}
    (found,) = ranks(1, steps, family, cases)
    check_gradients(found, "none")
    freed = {name: found["none"][1] - values for name, (_, values) in found.items()}
    assert freed["mlp"] == pytest.approx((5 if family == "llama" else 2) * FFN, abs=1)
    # Inputs of RMSNorm and its square root are kept too: it is several operations on CPU.
    norm = 2 * HIDDEN + 1 if family == "llama" else HIDDEN + 2
    assert freed["layernorm"] == pytest.approx(2 * (norm - RANDOM_STATE), abs=1)


def test_parts_of_experts_are_computed_again(ranks):
    cases = {module: EXPERTS | selective(module) for module in ("moe", "shared_experts", "layernorm")}
    (found,) = ranks(1, steps, "llama", {"none": EXPERTS, **cases})
    check_gradients(found, "none")
    freed = {name: found["none"][1] - values for name, (_, values) in found.items()}
    assert freed["moe"] > 300 and freed["shared_experts"] == pytest.approx(5 * 16 - RANDOM_STATE, abs=1)


def count_blocks(changes: dict) -> int:
    """Blocks of attention that a forward and backward pass compute forward."""
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        forward = AtenFlash.forward
        patch.setattr(AtenFlash, "forward", lambda *args, **how: calls.append(args) or forward(*args, **how))
        step("llama", changes)
        return len(calls)


def test_core_attention_is_computed_again_alone(ranks):
    (once,) = ranks(1, count_blocks, {})
    (twice,) = ranks(1, count_blocks, selective("core_attn"))
    (kept,) = ranks(1, count_blocks, selective("mlp", "layernorm"))
    assert (twice, kept) == (2 * once, once)
