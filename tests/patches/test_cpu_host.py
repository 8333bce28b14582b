"""The replacements that let megatron-core run on a host without a GPU, with one test each."""

import logging

import pytest
import torch
from megatron.core.distributed.fsdp import mcore_fsdp_adapter
from megatron.core.transformer.moe import token_dispatcher

from megatron.context_parallel.integration.norm import Norm
from megatron.context_parallel.patches import cpu_host

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="only for hosts without a GPU")
cpu_host.support_cpu_host()


@pytest.mark.parametrize("factory", ["tensor", "zeros", "ones"])
def test_factories_create_on_the_cpu(factory):
    assert getattr(torch, factory)([1, 2], device="cuda").device.type == "cpu"


def test_a_device_context_decides_where_factories_create():
    with torch.device("meta"):
        assert {getattr(torch, name)([2]).device.type for name in ("tensor", "zeros", "ones")} == {"meta"}


def test_factories_still_refuse_a_device_that_is_not_there():
    with pytest.raises(Exception, match=r"CUDA|NVIDIA"):
        torch.zeros(2, device="cuda:3")


def test_current_device_is_the_cpu():
    assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"


def test_synchronize_returns():
    assert torch.cuda.synchronize() is None


def test_streams_and_events_have_nothing_to_wait_for():
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    torch.cuda.Event().record().wait()
    assert torch.cuda.empty_cache() is None


def test_megatron_fsdp_is_built_on_meshes_of_the_cpu():
    meshes = mcore_fsdp_adapter.DeviceMesh
    with cpu_host.on_cpu_mesh():
        assert torch.device(f"cuda:{torch.cuda.current_device()}").type == "cuda"
        assert mcore_fsdp_adapter.DeviceMesh is not meshes
    assert mcore_fsdp_adapter.DeviceMesh is meshes
    assert torch.cuda.current_device() == torch.device("cpu")


def test_counts_of_tokens_are_arrays():
    counts = torch.tensor([3, 1])
    assert token_dispatcher.maybe_move_tensor_to_cpu(counts) is counts
    assert not torch.is_tensor(token_dispatcher.maybe_move_tensor_to_cpu(counts, as_numpy=True))


def test_tensors_stay_where_they_are():
    x = torch.ones(2)
    assert x.cuda() is x


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.float32, "Float"), (torch.float16, "Half"), (torch.bfloat16, "BFloat16")],
)
def test_float_types_have_cuda_names(dtype, name):
    assert torch.ones(2, dtype=dtype).type() == f"torch.cuda.{name}Tensor"


def test_other_types_and_casts_are_left_alone():
    assert torch.ones(2, dtype=torch.int64).type() == "torch.LongTensor"
    assert torch.ones(2).type(torch.float64).dtype == torch.float64


def test_device_generator_is_the_cpu_generator():
    torch.cuda.manual_seed(5)
    first = torch.rand(3)
    state = torch.cuda.get_rng_state()
    second = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), second)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_rng_tracker_forks_the_cpu_generator(caplog):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.manual_seed(1)
    outside = torch.rand(3)
    torch.manual_seed(1)
    tracker = CudaRNGStatesTracker()
    tracker.add("inner", 7)
    with caplog.at_level(logging.WARNING), tracker.fork("inner"):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), outside)
    assert torch.equal(inside, torch.rand(3, generator=torch.Generator().manual_seed(7)))
    assert not caplog.records


def test_recomputation_draws_the_same_numbers():
    from megatron.core.tensor_parallel.random import checkpoint

    drawn = []

    def noisy(x):
        drawn.append(torch.rand(3))
        return x * drawn[-1]

    x = torch.ones(3, requires_grad=True)
    checkpoint(noisy, False, x).sum().backward()
    assert len(drawn) == 2
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(x.grad, drawn[0])


def test_supporting_twice_changes_nothing():
    before = torch.zeros, torch.Tensor.type, torch.cuda.current_device
    cpu_host.support_cpu_host()
    assert (torch.zeros, torch.Tensor.type, torch.cuda.current_device) == before


class _Config:
    params_dtype = torch.float32
    sequence_parallel = True

    def __init__(self, normalization: str, zero_centered: bool) -> None:
        self.normalization, self.layernorm_zero_centered_gamma = normalization, zero_centered


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_norm(normalization):
    norm = Norm(config=_Config(normalization, False), hidden_size=5, eps=1e-3)
    x = torch.arange(10.0).view(2, 5)
    centred = x - x.mean(-1, keepdim=True) if normalization == "LayerNorm" else x
    expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), expected)
    added = Norm(config=_Config(normalization, True), hidden_size=5, eps=1e-3)
    with torch.no_grad():
        added.weight += 0.5  # from 0
    torch.testing.assert_close(added(x), 1.5 * expected)
    assert len(list(norm.parameters())) == (2 if normalization == "LayerNorm" else 1)
    assert all(p.sequence_parallel for p in norm.parameters())
