"""Modules that run anywhere take Transformer Engine's place in a layer spec. They name their parameters as it does."""

from contextlib import contextmanager
from unittest import mock

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron.context_parallel.integration import spec
from megatron.context_parallel.integration.norm import Norm
from megatron.context_parallel.patches.megatron_experts import parts_of_mlp


class _KeepsState:
    """Has a state of FP8, as a tensor of bytes; None is no state."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([1, 2, 3], dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        assert state is None or state.tolist() == [1, 2, 3]


class NormLinear(_KeepsState, ColumnParallelLinear):
    """Like TELayerNormColumnParallelLinear: the norm before the linear is a part of it."""

    def __init__(self, input_size: int, output_size: int, *, config, **options) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        norm = Norm(config, input_size, config.layernorm_epsilon)
        self.layer_norm_weight, self.layer_norm_bias = norm.weight, norm.bias

    def forward(self, x, *arguments, **options):
        shape = self.layer_norm_weight.shape
        if self.layer_norm_bias is None:
            x = torch.nn.functional.rms_norm(x, shape, self.layer_norm_weight, self.config.layernorm_epsilon)
        else:
            biases = self.layer_norm_weight, self.layer_norm_bias
            x = torch.nn.functional.layer_norm(x, shape, *biases, self.config.layernorm_epsilon)
        return super().forward(x, *arguments, **options)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0, "bias": 0}, sharded_offsets, **groups)


class FinalNorm(_KeepsState, Norm):
    pass


class _Provider:
    def layer_norm(self) -> type:
        return FinalNorm


def _layer(qk_layernorm: bool):
    layer = get_gpt_layer_local_spec(qk_layernorm=qk_layernorm)
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    parts.self_attention.submodules.linear_qkv = parts_of_mlp(parts.mlp).linear_fc1 = NormLinear
    parts.sharded_state_dict_keys_map = {}
    return layer


@contextmanager
def standing_in():
    """Within it, `--transformer-impl transformer_engine` builds the stand-in."""
    names = {"get_gpt_layer_with_transformer_engine_spec": _layer, "TESpecProvider": _Provider}
    with mock.patch.multiple(spec, check_importable=lambda: None, **names):
        yield
