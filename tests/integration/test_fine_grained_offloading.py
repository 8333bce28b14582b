"""megatron-core's own offloading of activations, with stand-ins for streams of a GPU and for Transformer Engine."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading

from megatron.context_parallel.cluster.step.memory import host_memory
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.train_config import TrainConfig
from tests.support import training_case
from tests.support.transformer_engine_standin import standing_in

MODEL = ModelShape(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    padded_vocab_size=training_case.VOCABULARY,
    swiglu=True,
)
RUN = TrainConfig(
    seq_length=training_case.SEQUENCE,
    micro_batch_size=1,
    global_batch_size=2,
    context_parallel_size=2,
    dtype="fp32",
    implementation="transformer_engine",
    min_offloaded_tensor_size=1,
)
TRAINED = {
    "num_layers": 3,
    "context_parallel_size": 2,
    "train_iters": 4,
    "eval_iters": 1,
    "eval_interval": 2,
    "micro_batch_size": 1,
}


class Stream:
    """Everything in it is done at once."""

    def wait_stream(self, other: "Stream") -> None: ...
    def wait_event(self, event: object) -> None: ...


class Event:
    def __init__(self, external: bool = False) -> None: ...
    def record(self, stream: Stream) -> None: ...


def is_no_weight(handler: object, tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, torch.nn.Parameter)


@contextmanager
def streams_on_host() -> Iterator[None]:
    """What megatron-core calls of a GPU runs on the host."""
    pool_name = "GPUTensorPool" if hasattr(offloading, "GPUTensorPool") else "OffloadTensorPool"  # megatron-core 0.19
    pool = getattr(offloading, pool_name)
    with pytest.MonkeyPatch.context() as patch:
        for name, fake in {"Stream": Stream, "Event": Event, "current_stream": Stream}.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda.nvtx, "range_push", lambda name: None)
        patch.setattr(torch.cuda.nvtx, "range_pop", lambda: None)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        patch.setattr(transformer_engine, "cpu_offload", SimpleNamespace(CPUOffloadEnabled=False))
        patch.setattr(offloading, pool_name, lambda device, pin_memory: pool(device))
        if hasattr(offloading.ChunkOffloadHandler, "_can_manage_tensor_for_offload"):  # it asks for a GPU's tensor
            patch.setattr(offloading.ChunkOffloadHandler, "_can_manage_tensor_for_offload", is_no_weight)
        patch.setattr(offloading, "print_offload_summary_table", lambda sizes: None)
        patch.setattr(offloading.PipelineOffloadManager, "OFFLOAD_MGR", None)
        yield


def train(modules: list[str], **changes) -> tuple[list[float], list[float], list[float], int]:
    """Losses, gradient norms and evaluations, and the bytes that the first step has in host memory."""
    offload = {"fine_grained_activation_offloading": True, "offload_modules": modules, "min_offloaded_tensor_size": 1}
    with standing_in(), streams_on_host():
        changes = {"transformer_impl": "transformer_engine"} | TRAINED | changes | (offload if modules else {})
        run = training_case.train("llama", **changes)
        manager = offloading.PipelineOffloadManager.OFFLOAD_MGR
        return run.losses, run.grad_norms, run.evaluations, manager.offload_summary_total_bytes if modules else 0


def runs(cases: list[list[str]], changes: dict) -> list[tuple]:
    return [train(modules, **changes) for modules in cases]


CASES = [["core_attn"], ["core_attn", "attn_proj"], ["qkv_linear", "core_attn", "attn_proj"]]


def test_offloading_changes_no_number_and_takes_what_is_predicted(ranks):
    strategy = "ulysses"  # attention saves what its swap brought
    plain, attention, projection, everything = ranks(2, runs, [[], *CASES], {"cp_strategy": strategy})[0]
    assert attention[:3] == projection[:3] == plain[:3]
    # The norm's own operations on a CPU: their gradients are added to each other before that of the residual.
    assert all(got == pytest.approx(want, rel=1e-6) for got, want in zip(everything[:3], plain[:3], strict=True))
    for modules, run in zip(CASES, (attention, projection), strict=False):
        expected = host_memory(MODEL, replace(RUN, cp_strategy=strategy, offload_modules=tuple(modules)))
        assert run[3] == expected
    assert everything[3] > projection[3] > attention[3] > 0
