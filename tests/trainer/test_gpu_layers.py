"""Training with the fused operations, the pipelines and the fp16 of a GPU has the losses of a run without them."""

import pytest
import torch

from tests.support import gpu_layers, training_case
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


@pytest.mark.parametrize("chunk", [6, 128])  # tokens of the loss at a time
def test_losses_of_fp16_are_those_of_float32(ranks, tmp_path, chunk):
    """From the same weights: torch 2.11 draws other ones in 16 bits."""
    ranks(1, training_case.save_initial, "llama", str(tmp_path), {})
    half = {"fp16": True, "params_dtype": torch.float16, "initial_loss_scale": 2.0**6, "min_loss_scale": 1.0}
    changes = {"load": str(tmp_path), "cross_entropy_chunk_size": chunk}
    ((losses, norms),) = ranks(1, gpu_layers.train, "llama", changes | half | {"loss_scale_window": 9, "hysteresis": 2})
    ((expected, expected_norms),) = ranks(1, gpu_layers.train_plainly, "llama", changes)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert norms == pytest.approx(expected_norms, rel=1e-3)
