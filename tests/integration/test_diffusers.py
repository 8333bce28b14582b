"""Transformers of HuggingFace diffusers with our attention: outputs and gradients of one rank with its own."""

import re
from pathlib import Path

import pytest
import torch

from megatron.context_parallel import ContextParallel, UsageError
from tests.support.diffusers_case import check, diffusers, flux, helios, wan

PAGE = Path(__file__).parents[2] / "docs" / "diffusers.md"


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
    counting = wan()[0]
    counting.blocks[0].attn1.is_amplify_history = True  # as in Helios
    gathered = helios()
    use_context_parallel(gathered, cp)
    attend = model.blocks[0].attn1.processor._attention_backend
    attend = diffusers.models.attention_dispatch._AttentionBackendRegistry._backends[attend]
    x = torch.zeros(1, 4, 2, 8)
    for wrong in (
        lambda: use_context_parallel(planless, cp),
        lambda: use_context_parallel(model, cp),
        lambda: use_context_parallel(odd, cp),
        lambda: use_context_parallel(counting, cp),
        lambda: model(**data, kv_cache_mode="cached"),
        lambda: model(**data, controlnet_block_samples=[x]),
        lambda: gathered(**data),
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
                "WanTransformer3DModel: is already parallel",
                "WanTransformer3DModel: WanAttnProcessor does not support attention backends",
                "WanTransformer3DModel: is_amplify_history finds the history in whole sequences only; give False",
                "kv_cache_mode cached: a rank has a part of the reference only; give None",
                "controlnet_block_samples: the plan of WanTransformer3DModel does not shard them; leave them out",
                "HeliosTransformer3DModel: its plan gathers tokens within layers, where gradients differ; use torch.no",
                "attn_mask: a rank has only a part of it",
                "dropout_p 0.0, is_causal True: not supported; give",
                "WanTransformer3DModel: attention backend AttentionBackendName.NATIVE was set later",
            ),
            strict=True,
        ):
            assert line.startswith(start) and "\n" not in line


def example() -> None:
    source = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL))
    exec(compile(source, str(PAGE), "exec"), {"__name__": "example"})


def test_the_example_of_the_page_runs(ranks):
    ranks(2, example)
