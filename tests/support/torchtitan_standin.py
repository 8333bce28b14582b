"""Takes torchtitan's place where it is not installed: what our adapter uses of release 0.3.0, and a small decoder."""

import contextlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class Module(torch.nn.Module):
    _sharding_config = None

    @dataclass(kw_only=True, slots=True)
    class Config:
        sharding_config: Any = None

        def build(self):
            made = self._owner(self)
            made._sharding_config = self.sharding_config
            return made

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            cls.Config._owner = cls


Module.Config._owner = Module


class FlexAttention(Module):
    class Config(Module.Config):
        pass


class VarlenAttention(Module):
    class Config(Module.Config):
        pass


@dataclass(kw_only=True)
class ShardingConfig:
    in_src_shardings: Any = None
    in_dst_shardings: Any = None
    local_map: Any = None


@dataclass(kw_only=True)
class LocalMapConfig:
    in_grad_placements: Any


SHARDED, WHOLE = "seq sharded", "gathered"
NAMES = ("q_BLNH", "k_BLNH", "v_BLNH")


def layer() -> SimpleNamespace:
    """Its keys and values are gathered before attention, as torchtitan's are."""
    moved = dict(zip(NAMES, (SHARDED, WHOLE, WHOLE), strict=True))
    sharding = ShardingConfig(in_src_shardings=dict.fromkeys(NAMES, SHARDED), in_dst_shardings=moved)
    return SimpleNamespace(attention=SimpleNamespace(inner_attention=FlexAttention.Config(sharding_config=sharding)))


class Decoder(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        layers: list = field(default_factory=lambda: [layer(), layer()])

    def __init__(self, config) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(of.attention.inner_attention.build() for of in config.layers)

    def get_attention_masks(self, positions):
        raise NotImplementedError


class WindowedDecoder(Decoder):
    class Config(Decoder.Config):
        pass

    def get_attention_masks(self, positions):
        raise NotImplementedError


class SelectiveAC:
    def get_save_ops(self) -> set:
        return {torch.ops.aten.mm.default}


def prepare_context_parallel_input(*given):
    raise NotImplementedError


def apply_cp_to_forward(attention_modules, cp_mesh):
    raise AssertionError("attention would be changed twice")


def parallelize_decoder(model, *, parallel_dims, training, parallelism, compile_config=None):
    apply_cp_to_forward(model.layers, parallel_dims.get_mesh("cp"))
    return model


class Trainer:
    @dataclass
    class Config:
        model_spec: Any
        training: Any
        parallelism: Any


def debugmodel(model=Decoder) -> Trainer.Config:
    spec = SimpleNamespace(model=model.Config(), parallelize_fn=parallelize_decoder)
    training = SimpleNamespace(seq_len=32, disable_cuda_graphs=True)
    parallelism = SimpleNamespace(context_parallel_load_balancer="headtail", context_parallel_degree=2)
    return Trainer.Config(spec, training, parallelism)


@contextlib.contextmanager
def standing_in(version: str = "0.3.0"):
    """Within it, `torchtitan` and `spmd_types` are these. The adapter is imported again, and removed afterwards."""
    cut = {"prepare_context_parallel_input": prepare_context_parallel_input}
    contents = {
        "spmd_types": {"no_typecheck": contextlib.nullcontext},
        "torchtitan": {"__version__": version},
        "torchtitan.trainer": {"Trainer": Trainer, **cut},
        "torchtitan.components": {},
        "torchtitan.components.validate": cut,
        "torchtitan.distributed": {"ParallelDims": object},
        "torchtitan.distributed.activation_checkpoint": {"SelectiveAC": type("SelectiveAC", (SelectiveAC,), {})},
        "torchtitan.models": {},
        "torchtitan.models.common": {},
        "torchtitan.models.common.attention": {"FlexAttention": FlexAttention},
        "torchtitan.models.common.decoder": {"Decoder": Decoder},
        "torchtitan.models.llama3": {},
        "torchtitan.models.llama3.config_registry": {"llama3_8b": debugmodel},
        "torchtitan.protocols": {},
        "torchtitan.protocols.module": {"Module": Module},
        "torchtitan.protocols.sharding": {"LocalMapConfig": LocalMapConfig, "ShardingConfig": ShardingConfig},
    }
    modules = {}
    for name, values in contents.items():
        modules[name] = ModuleType(name)
        vars(modules[name]).update(values)
        owner, _, part = name.rpartition(".")
        if owner:
            setattr(modules[owner], part, modules[name])
    ours = {f"megatron.context_parallel.{layer}.torchtitan" for layer in ("integration", "patches")}
    tops = "torchtitan", "spmd_types"
    theirs = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] in tops or name in ours}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in (*modules, *ours):
            sys.modules.pop(name, None)
        sys.modules.update(theirs)
