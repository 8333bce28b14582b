"""What recomputation computes again, keeps and offloads: the same gradients, bit for bit, in less memory."""

import ctypes
import gc
import resource
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from megatron.context_parallel.integration import host_memory
from megatron.context_parallel.integration.host_memory import HostMemory, HostQueue
from megatron.context_parallel.integration.norm import Norm
from megatron.context_parallel.kernels.aten import AtenFlash
from tests.support import training_case

TOKENS = 2 * training_case.SEQUENCE  # of a micro batch
LAYERS = 2, 4
HIDDEN, FFN, HEADS, QKV = 32, 48, 4, 64  # of the case's model, whose queries are as wide as it, and keys half of it
RANDOM_STATE = 2 * 5056 / 4 / TOKENS  # of two generators, which each of Megatron's checkpoints keeps
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16}
Gradients = dict[str, torch.Tensor]


def step(family: str, changes: dict) -> tuple[Gradients, int]:
    """The gradients of one micro batch, by weight, and the most bytes that the allocator had given at once."""
    args = training_case.case_args(family, use_distributed_optimizer=False, **changes)
    with training_case.groups(args):
        chunks = training_case.build(args).model
        data = [training_case.batches(args, 0)]
        gc.collect()  # what earlier steps left would end in this one
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            training_case.training.run_micro_batches(args, chunks, data, args.micro_batch_size, forward_only=False)
        events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        found = {name: weight.main_grad.clone() for name, weight in chunks[0].module.named_parameters()}
        training_case.forget_graphs(chunks)
        return found, most


def steps(family: str, cases: dict[str, dict]) -> dict[str, tuple[Gradients, float]]:
    """By case: the gradients, and the values of 4 bytes that a further layer takes at the peak, for a token."""
    found = {}
    for name, changes in cases.items():
        runs = [step(family, {"num_layers": layers, **changes}) for layers in LAYERS]
        (_, few), (gradients, many) = runs
        found[name] = gradients, (many - few) / (LAYERS[1] - LAYERS[0]) / TOKENS / 4
    return found


def check_gradients(found: dict[str, tuple[Gradients, float]], expected: str) -> None:
    for name, (gradients, _) in found.items():
        for weight, gradient in found[expected][0].items():
            assert torch.equal(gradients[weight], gradient), f"{name}: {weight}"


def selective(*modules: str) -> dict:
    return {"recompute_granularity": "selective", "recompute_modules": [*modules]}


@pytest.mark.parametrize("family", ["llama", "gpt3"])
def test_selective_recomputation_changes_no_gradient_and_frees_what_it_computes_again(ranks, family):
    modules = ("core_attn", "mlp", "layernorm")
    cases = {"none": {}, "all": selective(*modules), **{module: selective(module) for module in modules}}
    (found,) = ranks(1, steps, family, cases)
    check_gradients(found, "none")
    freed = {name: found["none"][1] - values for name, (_, values) in found.items()}
    assert freed["mlp"] == pytest.approx((5 if family == "llama" else 2) * FFN, abs=2)
    # Inputs of RMSNorm and its square root are kept too: it is several operations on CPU.
    norm = 2 * HIDDEN + 1 if family == "llama" else HIDDEN + 2
    assert freed["layernorm"] == pytest.approx(2 * (norm - RANDOM_STATE), abs=2)


def test_parts_of_experts_are_computed_again(ranks):
    cases = {module: EXPERTS | selective(module) for module in ("moe", "shared_experts", "layernorm")}
    (found,) = ranks(1, steps, "llama", {"none": EXPERTS, **cases})
    check_gradients(found, "none")
    freed = {name: found["none"][1] - values for name, (_, values) in found.items()}
    assert freed["moe"] > 300 and freed["shared_experts"] == pytest.approx(5 * 16 - RANDOM_STATE, abs=2)


def count_blocks(changes: dict) -> int:
    """Blocks of attention that a forward and backward pass compute forward."""
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        forward = AtenFlash.forward
        patch.setattr(AtenFlash, "forward", lambda *args, **how: calls.append(args) or forward(*args, **how))
        step("llama", changes)
        return len(calls)


def test_core_attention_is_computed_again_alone(ranks):
    (once,) = ranks(1, count_blocks, {})
    (twice,) = ranks(1, count_blocks, selective("core_attn"))
    (kept,) = ranks(1, count_blocks, selective("mlp", "layernorm"))
    assert (twice, kept) == (2 * once, once)


OFFLOADED = {"offload_checkpoints": True}
ATTENTION_KEPT = FULL | {"recompute_whitelist": ["core_attention"]}


def test_offloading_changes_no_gradient_and_leaves_the_device_what_it_takes_again(ranks):
    cases = {
        "full": FULL,
        "full offloaded": FULL | OFFLOADED,
        "block offloaded": FULL | OFFLOADED | {"recompute_method": "block"},
        "kept": ATTENTION_KEPT,
        "kept offloaded": ATTENTION_KEPT | {"offload_kept": True},
        "all offloaded": ATTENTION_KEPT | OFFLOADED | {"offload_kept": True},
    }
    (found,) = ranks(1, steps, "llama", cases)
    check_gradients(found, "full")
    layer = {name: values - RANDOM_STATE for name, (_, values) in found.items()}
    assert layer["full"] == pytest.approx(HIDDEN, abs=2)
    assert layer["kept"] == pytest.approx(HIDDEN + HIDDEN + HEADS, abs=2)  # input, output, log-sum-exp
    assert layer["full offloaded"] == pytest.approx(0, abs=2)
    assert layer["all offloaded"] == pytest.approx(0, abs=2)
    assert layer["kept offloaded"] == pytest.approx(HIDDEN, abs=2)


OUTPUTS = {  # values of a token
    "llama": {"qkv": QKV, "proj": HIDDEN, "fc1": 2 * FFN, "fc2": HIDDEN, "norms": 4 * HIDDEN + 2},
    "gpt3": {"qkv": 3 * HIDDEN, "fc1": FFN, "norms": 2 * HIDDEN + 4},  # proj and fc2 are as in llama
}
HALVES = {"bf16": True, "params_dtype": torch.bfloat16, "qk_layernorm": True}


@pytest.mark.parametrize("family", OUTPUTS)
def test_keeping_outputs_changes_no_gradient_and_takes_their_space(ranks, family):
    cases = {name: FULL | {"recompute_whitelist": [name]} for name in OUTPUTS[family]}
    (found,) = ranks(1, steps, family, {"full": FULL, **cases})
    check_gradients(found, "full")
    for name, values in OUTPUTS[family].items():
        assert found[name][1] - found["full"][1] == pytest.approx(values, abs=2), name
    everything = FULL | HALVES | {"recompute_whitelist": ["core_attention", *cases], "offload_kept": True}
    (found,) = ranks(1, steps, family, {"full": FULL | HALVES, "kept": everything})
    check_gradients(found, "full")
    assert found["kept"][1] == pytest.approx(found["full"][1], abs=2)


SPLIT = FULL | {"tensor_model_parallel_size": 2, "sequence_parallel": True}


@pytest.mark.parametrize(("family", "changes"), [("gpt3", SPLIT), ("llama", FULL | EXPERTS)])
def test_kept_products_and_norms_run_once(ranks, family, changes):
    """Split over two ranks with sequence parallelism; and experts, on two data-parallel ranks."""
    names = ["qkv", "proj", "fc1", "fc2", "norms"]
    both = {"full": changes, "kept": changes | {"recompute_whitelist": names}}
    for found, calls in ranks(2, steps_and_calls, family, both):
        check_gradients(found, "full")
        assert calls["full"] == 2 * calls["kept"] > 0


def steps_and_calls(family: str, cases: dict[str, dict]) -> tuple[dict, dict[str, int]]:
    """By case the gradients of a step of three layers, and the forward runs of their products and norms."""
    found, calls = {}, {}
    for name, changes in cases.items():
        with pytest.MonkeyPatch.context() as patch:
            ran = []
            for owner, method in ((Norm, "forward"), (LinearWithGradAccumulationAndAsyncCommunication, "forward")):
                patch.setattr(owner, method, counted(owner, method, ran))
            found[name] = step(family, {"num_layers": 3, **changes})
        calls[name] = len(ran) - 2  # the last norm and the output layer
    return found, calls


def counted(owner: type, name: str, calls: list):
    original = getattr(owner, name)

    def run(*args):
        calls.append(name)
        return original(*args)

    return staticmethod(run) if isinstance(vars(owner)[name], staticmethod) else run


SIZE = 9 * 2**18  # 9 MiB
M_MMAP_THRESHOLD = -3  # of mallopt(3)
SQUARES = 12


def square_often(x: torch.Tensor, around: Callable = nullcontext) -> torch.Tensor:
    for _ in range(SQUARES):
        with around():
            x = checkpoint(torch.square, x, use_reentrant=True)
    return x


def gradient_in_the_memory_of_nine() -> tuple[torch.Tensor, int]:
    """Of squares of squares, whose 12 inputs are saved, where 9 of them have space; and the host memory used."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_MMAP_THRESHOLD, 2**20)  # the C library maps each tensor, and returns it to the system at once
    x = torch.linspace(0.999, 1.001, SIZE, requires_grad=True)
    memory = HostMemory()
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    data = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, ((int(data.split()[1]) << 10) + 9 * x.nbytes, limits[1]))
    try:
        for _ in range(2):
            x.grad = None
            end = square_often(x, partial(memory.layer, inputs=True))
            end.sum().backward()
            del end
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            square_often(x)
        return x.grad[:: SIZE // 1000].clone(), memory.used
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        mallopt(M_MMAP_THRESHOLD, 2**25)  # the highest that the C library sets itself


def test_host_memory_does_not_count_and_is_used_again(ranks):
    ((gradient, used),) = ranks(1, gradient_in_the_memory_of_nine)
    x = torch.linspace(0.999, 1.001, SIZE)[:: SIZE // 1000].clone().requires_grad_()
    square_often(x).sum().backward()
    assert torch.equal(gradient, x.grad)
    assert used == SQUARES * 4 * SIZE


class Cudart:
    """CUDA's runtime, which remembers the pinned ranges: bytes by address."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def test_a_buffer_pins_its_own_bytes_and_no_more(monkeypatch):
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: None)
    memory = HostMemory(SlowStream())
    saved = memory.put(torch.arange(2**18 + 1.0))
    assert sum(cudart.pinned.values()) == memory.used == 4 * (2**18 + 1)
    del saved
    memory.put(torch.arange(2**18 + 1.0))
    assert sum(cudart.pinned.values()) == memory.used == 4 * (2**18 + 1)
    del memory
    gc.collect()
    assert not cudart.pinned


class SlowStream:
    """Copies when it is waited for, and not before. Lists what is started and waited for, by the number of values."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self._waiting: list[tuple] = []

    def start(self, to: torch.Tensor, of: torch.Tensor) -> tuple:
        self._waiting.append((to, of))
        self.done.append(f"start {of.numel()}")
        return self._waiting[-1]

    def wait(self, copy: tuple) -> None:
        self.done.append(f"wait {copy[0].numel()}")
        while any(one is copy for one in self._waiting):
            to, of = self._waiting.pop(0)
            to.copy_(of)


def test_tensors_of_a_layer_travel_while_the_layer_after_it_is_at_work():
    memory = HostMemory(SlowStream())
    layers = [HostQueue(memory) for _ in range(3)]
    for number, queue in enumerate(layers, 1):
        with memory.layer(inputs=False):
            queue.append((torch.arange(10.0 * number), torch.arange(10.0 * number + 1)))
    memory.stream.done.clear()
    for number, queue in reversed([*enumerate(layers, 1)]):
        first, second = queue.popleft()
        assert torch.equal(first, torch.arange(10.0 * number)) and torch.equal(second, torch.arange(10.0 * number + 1))
    two_layers = ["start 30", "start 31", "start 20", "start 21", "wait 30", "wait 31"]
    assert memory.stream.done == [*two_layers, "start 10", "start 11", "wait 20", "wait 21", "wait 10", "wait 11"]


def slow_step(changes: dict) -> Gradients:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_memory, "CPUStream", SlowStream)
        return step("llama", changes)[0]


def test_nothing_is_read_before_its_copy_is_done(ranks):
    names = ["core_attention", "qkv", "proj", "fc1", "fc2", "norms"]
    offloaded = FULL | OFFLOADED | {"recompute_whitelist": names, "offload_kept": True}
    ((expected, _),) = ranks(1, step, "llama", FULL)
    (found,) = ranks(1, slow_step, offloaded)
    for weight, gradient in expected.items():
        assert torch.equal(found[weight], gradient), weight


def test_a_queue_in_host_memory_gives_tensors_back_as_they_were():
    queue = HostQueue(HostMemory())
    given = torch.arange(6.0).view(2, 3).t(), torch.empty(0, 2), torch.tensor([1, 2], dtype=torch.bfloat16)
    queue.append(given)
    queue.append((torch.ones(2),))
    assert len(queue) == 2
    for found, tensor in zip(queue.popleft(), given, strict=True):
        assert torch.equal(found, tensor) and (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())
    assert queue.popleft()[0].tolist() == [1, 1] and not queue
