"""The MLP in chunks of tokens: gradients of the whole MLP, with the activations of one chunk alive at a time."""

import weakref
from unittest.mock import patch

import pytest
from megatron.core.transformer.mlp import MLP

from megatron.context_parallel.cluster.step import mlp_chunks
from megatron.context_parallel.cluster.step.mlp_chunks import MLP_AT_ONCE
from tests.support import training_case

CHUNKS = 4
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TWO_LAYERS = RECOMPUTED | {"recompute_num_layers": 2}
OUTPUTS = 2 * training_case.SEQUENCE * 2 * 48 * 4  # bytes of fc1's outputs for a micro batch: gates and values
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}


def gradients(family: str, changes: dict, at_once: int = MLP_AT_ONCE) -> tuple[float, dict, int, int]:
    """Of one micro batch: its loss, the gradients by weight, the most bytes of outputs of fc1 at once, and its rows."""
    args = training_case.case_args(family, use_distributed_optimizer=False, **changes)
    made: list[weakref.ref] = []
    sizes, rows = [], []

    def count(layer, given, out) -> None:
        made.append(weakref.ref(out[0]))
        sizes.append(sum(inner.nbytes for ref in made if (inner := ref()) is not None))
        rows.append(len(out[0]))

    with training_case.groups(args), patch.object(mlp_chunks, "MLP_AT_ONCE", at_once):
        chunks = training_case.build(args).model
        gpt = chunks[0].module
        for module in gpt.modules():
            if isinstance(module, MLP):
                module.linear_fc1.register_forward_hook(count)
        data = training_case.training.run_micro_batches(
            args, chunks, [training_case.batches(args, 0)], args.micro_batch_size, forward_only=False
        )
        found = {name: weight.main_grad.clone() for name, weight in gpt.named_parameters()}
        return data[0][0].item(), found, max(sizes), sum(rows)


def check(cut: tuple, whole: tuple, chunks: int) -> None:
    assert cut[0] == pytest.approx(whole[0], rel=1e-6)
    assert 0 < chunks * cut[2] <= whole[2]  # without recomputation, whole MLPs of all layers are kept
    for name, gradient in whole[1].items():
        assert (cut[1][name] - gradient).norm() <= 2e-6 * gradient.norm(), name


@pytest.mark.parametrize("family", ["llama", "gpt3"])
@pytest.mark.parametrize(
    ("recompute", "again"), [({}, 1), (RECOMPUTED, 0), (TWO_LAYERS, 1)], ids=["kept", "each layer", "two layers"]
)
def test_chunks_change_no_gradient(ranks, family, recompute, again):
    """`again`: the forward passes of the MLP that chunks add. A row of each layer is for its bias."""
    (whole,) = ranks(1, gradients, family, recompute)
    (cut,) = ranks(1, gradients, family, recompute | {"mlp_chunks_for_training": CHUNKS})
    check(cut, whole, CHUNKS)
    passes = 2 if recompute else 1
    bias_rows = 2 * (again == 0)
    assert (cut[3] - bias_rows) * passes == whole[3] * (passes + again)


@pytest.mark.parametrize("recompute", [RECOMPUTED, SELECTIVE, {}], ids=["full", "mlp", "none"])
def test_large_mlps_are_cut_where_that_is_free(ranks, recompute):
    """Chunks have at most `MLP_AT_ONCE` bytes of outputs; one chunk turns them off."""
    default = recompute | {"mlp_chunks_for_training": None}
    (whole,) = ranks(1, gradients, "llama", recompute | {"mlp_chunks_for_training": 1}, 1)
    (cut,) = ranks(1, gradients, "llama", default, OUTPUTS // 2)
    (uncut,) = ranks(1, gradients, "llama", default, OUTPUTS)
    check(cut, whole, 2 if recompute else 1)
    assert uncut[2:] == whole[2:]
    assert recompute or cut[2:] == whole[2:]
