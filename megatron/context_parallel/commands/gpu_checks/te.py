"""Compares our attention inside Transformer Engine's layers with its own, forward and backward."""

import importlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.context_parallel import ContextParallel
from megatron.context_parallel.integration.transformer_engine import DotProductAttention, why_not_importable

from .common import CheckReport, CheckSizes, model_parallel, world_of_one

BOUND = 2e-2  # for bfloat16, relative error of a whole tensor


def check_te(report: CheckReport, sizes: CheckSizes, device: torch.device) -> None:
    """Errors in TE's layer, and in losses and gradients of megatron-core's model; or why it was skipped."""
    if why := why_not_importable():
        report.add("te", left_out=f"Transformer Engine: {why}")
        return
    with world_of_one(device):
        cases = [("TransformerLayer", lambda: _layer(sizes, device))]
        if find_spec("megatron.core"):
            cases.append(("GPTModel", lambda: _model(sizes, device)))
        for name, case in cases:
            theirs, ours = case()
            out, gradients = (float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))
            verdict = "PASS" if max(out, gradients) <= BOUND else "FAIL"
            report.add("te", checked=name, out=out, gradients=gradients, verdict=verdict)


def _layer(sizes: CheckSizes, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """A layer's output and gradients, with TE's core attention and with ours."""
    pytorch = importlib.import_module("transformer_engine.pytorch")
    (heads, kv_heads), dim = sizes.overhead_heads, sizes.speed_head_dims[0]
    torch.manual_seed(0)
    layer = pytorch.TransformerLayer(
        heads * dim, 2 * heads * dim, heads, num_gqa_groups=kv_heads, hidden_dropout=0.0, attention_dropout=0.0,
        self_attn_mask_type="causal", params_dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    x = torch.randn(sizes.te_rows, 1, heads * dim, dtype=torch.bfloat16, device=device, requires_grad=True)
    theirs = _results(layer, lambda: layer(x), x)
    layer.self_attention.core_attention = DotProductAttention(heads, dim, kv_heads, cp_strategy="ring")
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    layer.set_context_parallel_group(dist.group.WORLD, [0], stream)
    return theirs, _results(layer, lambda: layer(x), x)


def _model(sizes: CheckSizes, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """A model's losses and gradients, with TE's layer spec and with our core attention in it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron.context_parallel.integration.spec import use_core_attention

    (heads, kv_heads), dim, length, vocabulary = sizes.overhead_heads, sizes.speed_head_dims[0], sizes.te_rows, 512
    with model_parallel():
        model_parallel_cuda_manual_seed(1)
        config = TransformerConfig(
            num_layers=2, hidden_size=heads * dim, num_attention_heads=heads, num_query_groups=kv_heads,
            ffn_hidden_size=2 * heads * dim, hidden_dropout=0.0, attention_dropout=0.0, add_bias_linear=False,
            bf16=True, params_dtype=torch.bfloat16, use_cpu_initialization=device.type == "cpu",
        )  # fmt: skip
        layers = [get_gpt_layer_with_transformer_engine_spec() for _ in range(2)]
        use_core_attention(layers[1], ContextParallel("ring"))
        models = [
            GPTModel(config, layer, vocabulary, length, position_embedding_type="rope").to(device, torch.bfloat16)
            for layer in layers
        ]
        models[1].load_state_dict(models[0].state_dict(), strict=False)  # ours has no FP8 state
        tokens = torch.randint(vocabulary, (1, length + 1), device=device)
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        places = torch.arange(length, device=device)[None]
        theirs, ours = (_results(m, partial(m, inputs, places, None, labels=labels)) for m in models)
        return theirs, ours


def _results(module: torch.nn.Module, call: Callable[[], Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output of a call, and the gradients of the sum of its squares for inputs and parameters, in float32."""
    leaves = [*inputs, *(p for p in module.parameters() if p.requires_grad)]
    out = call()
    grads = torch.autograd.grad(out.float().square().sum(), leaves)
    return [out.detach().float(), torch.cat([x.float().flatten() for x in grads])]
