"""On a host without a GPU: the weights of a model answer that they are on a GPU, and copies of them on the host do not.

What megatron-core's `HybridDeviceOptimizer` does with them runs as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import optimizer_config
from torch import Tensor

from tests.support import training_case

OFFLOADED = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, "pin_cpu_grads": False}
HALF = OFFLOADED | {"optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True}


@contextmanager
def weights_on_device() -> Iterator[None]:
    """Weights of DDP that is built meanwhile are on a pretended GPU, with what is cloned or converted there."""
    there: dict[int, object] = {}  # storages by address; kept, so that no other gets the address
    clone, convert, to, init = Tensor.clone, Tensor.float, Tensor.to, DistributedDataParallel.__init__

    def is_there(tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in there

    def put(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        there[storage.data_ptr()] = storage
        return tensor

    def build(ddp, *args, **how):
        init(ddp, *args, **how)
        for buffer in ddp.buffers:
            put(buffer.param_data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer_config, "is_te_min_version", lambda version: True)
        patch.setattr(DistributedDataParallel, "__init__", build)
        patch.setattr(Tensor, "is_cuda", property(is_there), raising=False)
        patch.setattr(Tensor, "clone", lambda x, **how: put(clone(x, **how)) if x.is_cuda else clone(x, **how))
        patch.setattr(Tensor, "float", lambda x: put(convert(x)) if x.is_cuda else convert(x))
        patch.setattr(Tensor, "cpu", lambda x: clone(x))
        patch.setattr(Tensor, "pin_memory", lambda x: x)
        patch.setattr(Tensor, "to", lambda x, *how, **more: put(clone(x)) if how == ("cuda",) else to(x, *how, **more))
        yield


def train(changes: dict) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a bf16 run of two context ranks, with two micro batches."""
    with weights_on_device() if changes.get("optimizer_cpu_offload") else nullcontext():
        run = training_case.train("llama", context_parallel_size=2, bf16=True, params_dtype=torch.bfloat16, **changes)
    return run.losses, run.grad_norms


def relays(directory: str) -> list[tuple[list[float], list[float]]]:
    """Four steps with the optimizer on the device and on the host; two steps, from checkpoints of those, of others."""
    kinds: dict[str, dict] = {"device": {}, "host": OFFLOADED}
    saves = {"train_iters": 4, "save_interval": 2}
    found = [train(kinds[name] | saves | {"save": f"{directory}/{name}"}) for name in kinds]
    loads = {"train_iters": 4, "ckpt_step": 2}
    for start, then in (("host", {}), ("device", HALF), ("host", OFFLOADED)):
        found.append(train(then | loads | {"load": f"{directory}/{start}"}))
    return found
