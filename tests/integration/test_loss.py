"""The loss in chunks of tokens: gradients of the loss of all tokens, with the logits of one chunk alive at a time."""

import pytest
import torch

from tests.support import training_case

WHOLE, CHUNK = 64, 6  # tokens; the last chunk is smaller
TIED = {"untie_embeddings_and_output_weights": False}


def gradients(changes: dict, loss_scale: float) -> tuple[float, dict[str, torch.Tensor], int]:
    """Of one micro batch: its loss, the gradients by weight, and the most tokens whose logits were computed at once."""
    args = training_case.case_args("llama", use_distributed_optimizer=False, **changes)
    with training_case.groups(args):
        chunks = training_case.build(args).model
        gpt = chunks[0].module
        gpt.config.grad_scale_func = (lambda loss: loss * torch.tensor([loss_scale])) if loss_scale != 1 else None
        tokens = []
        gpt.output_layer.register_forward_hook(lambda layer, given, out: tokens.append(out[0].shape[:2].numel()))
        data = training_case.training.run_micro_batches(
            args, chunks, [training_case.batches(args, 0)], args.micro_batch_size, forward_only=False
        )
        found = {name: weight.main_grad.clone() for name, weight in gpt.named_parameters()}
        return data[0][0].item(), found, max(tokens)


@pytest.mark.parametrize(("model", "loss_scale"), [({}, 1), (TIED, 4096)], ids=["untied", "tied, scaled"])
def test_chunks_change_no_gradient(ranks, model, loss_scale):
    (whole,) = ranks(1, gradients, model, loss_scale)
    (cut,) = ranks(1, gradients, model | {"cross_entropy_chunk_size": CHUNK}, loss_scale)
    assert cut[0] == pytest.approx(whole[0], rel=1e-6)
    assert (whole[2], cut[2]) == (WHOLE, CHUNK)
    for name, gradient in whole[1].items():
        assert (cut[1][name] - gradient).norm() <= 2e-6 * gradient.norm(), name
