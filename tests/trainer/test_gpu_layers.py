"""Training with the fused operations and the pipelines of a GPU has the losses of a run without them."""

import pytest

from tests.support import gpu_layers
from tests.support.training_spreads import SPREADS

EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24}
CASES = {
    "SwiGLU": ("llama", 1, {}),
    "experts with biases": ("llama", 1, EXPERTS | {"add_bias_linear": True}),
    "experts with GELU": ("gpt3", 1, EXPERTS),
    "pipeline": SPREADS["cp2 pp2 outputs kept"],
}


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_a_cpu(ranks, case):
    family, n, changes = CASES[case]
    for found, expected in zip(
        ranks(n, gpu_layers.train, family, changes),
        ranks(n, gpu_layers.train_plainly, family, changes),
        strict=True,
    ):
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], rel=1e-5)
