"""The code of each rank of first_token.py: prefills of Llama 3 405B's share of a GPU, on an emulated device."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import mappings, model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from benchmarks.device import DeviceKernel, EmulatedDevice
from benchmarks.device_training import products_take_time
from benchmarks.job import run_job
from benchmarks.rounds import interleave
from benchmarks.stopwatch import Stopwatch
from megatron.context_parallel import ContextParallel
from megatron.context_parallel.cluster.description import Cluster, load_cluster
from megatron.context_parallel.inference import cache_attention
from megatron.context_parallel.inference.session import Session
from megatron.context_parallel.integration.rope import use_layout
from megatron.context_parallel.integration.spec import block_spec
from megatron.context_parallel.kernels.choose import kernel_for
from megatron.context_parallel.patches.cpu_host import support_cpu_host
from tools.netlab import Busy

HEADS, HEAD_DIM = 16, 128  # of the 128 heads of Llama 3 405B, and one of its 8 key/value heads
VOCABULARY = 64
MLP = 64  # its products take no time of their own: see `Layers`


class Layers:
    """The time of a layer beside attention and messages between hosts, which a device takes by sleeping.

    Attributes:
        rest: seconds of a layer's products, norms, sums inside a host and its overhead.
        sums: seconds inside a host of each sum over tensor-parallel ranks, at the same time as that between hosts.
    """

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.rest = self.sums = 0.0
        self.inside = False

    def follow(self, model: GPTModel) -> None:
        """The layers of `model` take this time from now on."""
        for layer in model.decoder.layers:
            layer.register_forward_pre_hook(lambda *_: self.begin())

    def begin(self) -> None:
        self.inside = True
        with self.device.work(self.rest):
            pass

    @contextmanager
    def of(self, case: dict) -> Iterator[None]:
        """The times of a case."""
        self.rest, self.sums, self.inside = case["rest"], case["sums"], False
        yield

    def watch_sums(self) -> None:
        """Sums of megatron-core take at least as long as those inside a host. That of the embedding is left out: there
        is one in a model, not one in each layer."""
        summed = mappings._reduce

        def reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
            if self.device.computes:
                return summed(x, group)
            if not self.inside or group.size() == 1:
                return x
            with self.device.work(self.sums):
                return summed(x, group)

        mappings._reduce = reduce


def build(parallel: str, layers: int, tokens: int, cluster: Cluster) -> Session:
    """A session over a model with random weights, whose ranks share the context or the heads."""
    sizes = {f"{kind}_parallel_size": 1 for kind in ("context", "tensor_model")}
    sizes["context_parallel_size" if parallel == "context" else "tensor_model_parallel_size"] = dist.get_world_size()
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=HEADS * HEAD_DIM,
        ffn_hidden_size=MLP,
        num_attention_heads=HEADS,
        num_query_groups=1,
        kv_channels=HEAD_DIM,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        add_bias_linear=False,
        bias_dropout_fusion=False,
        transformer_impl="local",
        bf16=True,
        params_dtype=torch.bfloat16,
        **sizes,
    )
    cp = ContextParallel("ring", group=parallel_state.get_context_parallel_group())
    model = GPTModel(config, block_spec(config, cp, layers), VOCABULARY, 1, position_embedding_type="rope")
    use_layout(model, cp)
    return Session(model.bfloat16().eval(), cp, cache_tokens=2 * tokens + 128 * cp.n, cluster=cluster)


def measure(job: dict) -> list[dict]:
    """Rounds of the prefills in `cases`; collective over the world.

    A case has `parallel` ("context" or "tensor"), `new` and `cached` tokens, `choice` of the variant, and `rest` and
    `sums` as in `Layers`. Returns each with its `variant`, `python` (this thread's seconds of a pass in which the
    device takes no time), and `rounds` as `rounds.interleave` fills them.
    """
    support_cpu_host()
    cluster = load_cluster(job["cluster"])
    device = EmulatedDevice(cluster.device, "bf16", HEAD_DIM, Busy())
    layers, watch, entries = Layers(device), Stopwatch(), list[dict]()
    products_take_time(device, SimpleNamespace(product=lambda k, n: 0.0))
    layers.watch_sums()
    cache_attention.kernel_for = lambda *args, **how: DeviceKernel(kernel_for(*args, **how), device)
    watch.watch_waits()
    for parallel in ("context", "tensor"):
        runs = [case | {"rounds": []} for case in job["cases"] if case["parallel"] == parallel]
        if not runs:
            continue
        device.computes = True
        session = build(parallel, job["layers"], max(case["new"] + case["cached"] for case in runs), cluster)
        layers.follow(session.model)
        device.computes = False
        for entry in runs:
            entry["python"] = python_seconds(partial(prefill, session, entry, layers), device)
        interleave([(entry, partial(prefill, session, entry, layers)) for entry in runs], job["rounds"], 0, watch)
        entries += runs
        parallel_state.destroy_model_parallel()
    return entries


def prefill(session: Session, entry: dict, layers: Layers) -> None:
    """New tokens of one sequence after its cached ones."""
    sequence = session.open()
    if entry["cached"]:
        session.tables.add({sequence: entry["cached"]})
    with layers.of(entry):
        session.forward({sequence: [7] * entry["new"]}, entry["choice"])
    entry["variant"] = session.variant
    session.free(sequence)


def python_seconds(run, device: EmulatedDevice) -> float:
    """The most processor time of a rank's thread in a second pass, in which the device takes no time."""
    busy, device.busy = device.busy, lambda seconds: nullcontext()
    run()
    begun = time.thread_time()
    run()
    spent = torch.tensor(time.thread_time() - begun)
    device.busy = busy
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


if __name__ == "__main__":
    run_job(measure)
