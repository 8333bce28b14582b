"""The MLP in chunks of tokens: gradients of the whole MLP, with the activations of one chunk alive at a time."""

import weakref

import pytest
import torch
from megatron.core.transformer.mlp import MLP

from tests.support import training_case

CHUNKS = 4
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def gradients(family: str, changes: dict) -> tuple[float, dict[str, torch.Tensor], int]:
    """Of one micro batch: its loss, the gradients by weight, and the most bytes of outputs of fc1 at once."""
    args = training_case.case_args(family, use_distributed_optimizer=False, **changes)
    made: list[weakref.ref] = []
    sizes = []

    def count(layer, given, out) -> None:
        made.append(weakref.ref(out[0]))
        sizes.append(sum(inner.nbytes for ref in made if (inner := ref()) is not None))

    with training_case.groups(args):
        chunks = training_case.build(args).model
        gpt = chunks[0].module
        for module in gpt.modules():
            if isinstance(module, MLP):
                module.linear_fc1.register_forward_hook(count)
        data = training_case.training.run_micro_batches(
            args, chunks, [training_case.batches(args, 0)], args.micro_batch_size, forward_only=False
        )
        found = {name: weight.main_grad.clone() for name, weight in gpt.named_parameters()}
        return data[0][0].item(), found, max(sizes)


@pytest.mark.parametrize("family", ["llama", "gpt3"])
@pytest.mark.parametrize("recompute", [{}, RECOMPUTED], ids=["kept", "recomputed"])
def test_chunks_change_no_gradient(ranks, family, recompute):
    (whole,) = ranks(1, gradients, family, recompute)
    (cut,) = ranks(1, gradients, family, recompute | {"mlp_chunks_for_training": CHUNKS})
    assert cut[0] == pytest.approx(whole[0], rel=1e-6)
    assert 0 < CHUNKS * cut[2] <= whole[2]  # without recomputation, whole MLPs of all layers are kept
    for name, gradient in whole[1].items():
        assert (cut[1][name] - gradient).norm() <= 2e-6 * gradient.norm(), name
