"""Training with the fused operations, the pipelines and the fp16 of a GPU has the losses of a run without them."""

import pytest
import torch

from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.model.build import transformer_config
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


@pytest.mark.parametrize("virtual,newer,freed", [(4, True, True), (1, False, True), (1, True, False)])
def test_no_memory_is_freed_that_is_still_being_sent(monkeypatch, virtual, newer, freed):
    """Interleaved stages do not wait for what they send, and torch 2.15's NCCL does not keep its memory."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = "--num-layers 8 --hidden-size 96 --num-attention-heads 6 --seq-length 64 --micro-batch-size 1 --dry-run"
    flags += (
        f" --pipeline-model-parallel-size 2 --global-batch-size 2 --num-layers-per-virtual-pipeline-stage {virtual}"
    )
    args = parse_args(flags.split())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if newer:
        monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL2", object, raising=False)
    else:
        monkeypatch.delattr(torch.distributed, "ProcessGroupNCCL2", raising=False)
    assert transformer_config(args).deallocate_pipeline_outputs is freed
