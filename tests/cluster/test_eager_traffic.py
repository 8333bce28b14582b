"""The memory traffic of a layer on a CPU, against a count of what PyTorch's operations read and write."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.step.layer_time import LayerTime
from megatron.context_parallel.trainer import training
from megatron.context_parallel.trainer.config.workload import model_of, run_of
from tests.support import training_case

SIZES = {"use_distributed_optimizer": False, "recompute_granularity": None, "hidden_size": 64, "ffn_hidden_size": 256}
UNCOUNTED = "mm", "attention", "view", "empty", "detach", "add_"  # products, attention, views, sums of gradients


class Count(TorchDispatchMode):
    """Bytes that operations read and write, if each of their tensors crosses memory once."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, op, types, args=(), how=None):
        out = op(*args, **(how or {}))
        if not op.is_view and not any(name in str(op) for name in UNCOUNTED):
            tensors = [leaf for leaf in tree_leaves((args, how, out)) if isinstance(leaf, torch.Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return out


def moved(layers: int) -> tuple[int, float]:
    """Bytes that a micro batch moves, and those that a layer is predicted to move."""
    args = training_case.case_args("llama", num_layers=layers, **SIZES)
    with training_case.groups(args):
        (model,) = training_case.build(args).model
        with Count() as count:
            out, loss = training._forward_step(args, training_case.batches(args, 0), model)
            loss(out)[0].backward()
        training_case.forget_graphs([model])
    device = load_cluster("dgx-h100").device
    time = LayerTime(model_of(args), run_of(args), device)
    predicted = sum(time.layer(backward).moving for backward in (False, True))
    return count.bytes, predicted * device.memory_GB_s * 1e9


def both() -> list[tuple[int, float]]:
    return [moved(1), moved(2)]


def test_a_layer_on_a_cpu_moves_what_its_operations_move(ranks):
    ((one, predicted), (two, _)), *_ = ranks(1, both)
    assert predicted == pytest.approx(two - one, rel=0.01)
