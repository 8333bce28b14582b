"""Transformers of HuggingFace diffusers with our attention: outputs and gradients of one rank with its own."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel import ContextParallel, UsageError

diffusers = pytest.importorskip("diffusers", reason="needs the package diffusers")

PAGE = Path(__file__).parents[2] / "docs" / "diffusers.md"


def flux() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A small Flux of random weights, in which text and image tokens attend together, and its inputs."""
    torch.manual_seed(1)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
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
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=8,
        ffn_dim=16,
        num_layers=1,
    )
    data = {"hidden_states": torch.randn(1, 4, 2, 4, 8), "encoder_hidden_states": torch.randn(1, 8, 8)}
    return model, data | {"timestep": torch.tensor([3])}


def results(make, spec: str | None) -> list[torch.Tensor]:
    """Output and gradients, those of weights summed over the ranks."""
    model, data = make()
    if spec:
        from megatron.context_parallel.integration.diffusers import use_context_parallel

        use_context_parallel(model, ContextParallel(spec))
    (out,) = model(**data, return_dict=False)
    out.square().sum().backward()
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    for grad in grads if spec else ():
        dist.all_reduce(grad)
    return [out.detach(), *grads]


def check(ranks, n: int, make, spec: str) -> None:
    expected = results(make, None)
    for of_rank in ranks(n, results, make, spec):
        for got, exact in zip(of_rank, expected, strict=True):
            torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make,spec", [(flux, "ulysses"), (wan, "ring")])
def test_outputs_and_gradients_equal_one_rank(ranks, make, spec):
    check(ranks, 2, make, spec)


def mistakes() -> list[str]:
    from megatron.context_parallel.integration.diffusers import use_context_parallel

    cp, said = ContextParallel("ring"), []
    model, _ = wan()
    use_context_parallel(model, cp)
    planless = wan()[0]
    planless._cp_plan = None
    changed, data = wan()
    use_context_parallel(changed, cp)
    changed.set_attention_backend("native")
    odd = wan()[0]
    for block in odd.blocks:
        del type(block.attn1.processor)._attention_backend
    attend = model.blocks[0].attn1.processor._attention_backend
    attend = diffusers.models.attention_dispatch._AttentionBackendRegistry._backends[attend]
    x = torch.zeros(1, 4, 2, 8)
    for wrong in (
        lambda: use_context_parallel(planless, cp),
        lambda: use_context_parallel(model, cp),
        lambda: use_context_parallel(odd, cp),
        lambda: attend(x, x, x, attn_mask=x),
        lambda: attend(x, x, x, is_causal=True),
        lambda: changed(**data),
    ):
        with pytest.raises(UsageError) as caught:
            wrong()
        said.append(str(caught.value))
    return said


def test_wrong_uses_are_told(ranks):
    for said in ranks(2, mistakes):
        for line, start in zip(
            said,
            (
                "WanTransformer3DModel: has no _cp_plan",
                "WanTransformer3DModel: is parallel already",
                "WanTransformer3DModel: WanAttnProcessor takes no attention backend",
                "attn_mask: a rank has a part of it only",
                "dropout_p 0.0, is_causal True: not supported here",
                "WanTransformer3DModel: attention backend AttentionBackendName.NATIVE was set since",
            ),
            strict=True,
        ):
            assert line.startswith(start) and "\n" not in line


def example() -> None:
    source = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    exec(compile(source, str(PAGE), "exec"), {"__name__": "example"})


def test_the_example_of_the_page_runs(ranks):
    ranks(2, example)
