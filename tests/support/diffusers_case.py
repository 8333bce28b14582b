"""Small diffusion transformers, computed by all ranks and by one."""

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel import ContextParallel
from tests.support.device import head_dim, on_device

diffusers = pytest.importorskip("diffusers", reason="needs the package diffusers")


def flux() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A small Flux of random weights, in which text and image tokens attend together, and its inputs."""
    torch.manual_seed(1)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=head_dim(16),
        num_attention_heads=4,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=tuple(head_dim(16) // part for part in (4, 4, 2)),
    )
    data = {"hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 8, 8)}
    places = {"img_ids": torch.randn(16, 3), "txt_ids": torch.zeros(8, 3)}
    return model, data | places | {"pooled_projections": torch.randn(2, 8), "timestep": torch.tensor([0.3, 0.6])}


def wan() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A small Wan of random weights, with attention of video tokens to text."""
    torch.manual_seed(1)
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=head_dim(12),
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=8,
        ffn_dim=16,
        num_layers=1,
    )
    data = {"hidden_states": torch.randn(1, 4, 2, 4, 8), "encoder_hidden_states": torch.randn(1, 8, 8)}
    return model, data | {"timestep": torch.tensor([3])}


def helios() -> torch.nn.Module:
    """A small Helios, whose plan has 40 layers and gathers tokens within each."""
    sizes = {"num_attention_heads": 1, "attention_head_dim": 6, "rope_dim": (2, 2, 2), "num_layers": 40}
    return diffusers.HeliosTransformer3DModel(in_channels=1, out_channels=1, text_dim=2, freq_dim=2, ffn_dim=2, **sizes)


def results(make, spec: str | None) -> list[torch.Tensor]:
    """Output and gradients on the host, those of weights summed over the ranks."""
    model, data = map(on_device, make())
    if spec:
        from megatron.context_parallel.integration.diffusers import use_context_parallel

        use_context_parallel(model, ContextParallel(spec))
    (out,) = model(**data, return_dict=False)
    out.square().sum().backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    for grad in grads if spec else ():
        dist.all_reduce(grad)
    return [x.detach().cpu() for x in (out, *grads)]


def check(ranks, n: int, make, spec: str) -> None:
    expected = results(make, None)
    for of_rank in ranks(n, results, make, spec):
        for got, exact in zip(of_rank, expected, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)
