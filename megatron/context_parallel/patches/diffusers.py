"""HuggingFace diffusers: additional attention backends, and the plan that shards models.

The public `set_attention_backend` and `enable_parallelism` accept only names of diffusers.
"""

from collections.abc import Callable
from typing import Any, cast

from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models._modeling_parallel import ContextParallelConfig, ContextParallelOutput
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.models.modeling_utils import ModelMixin
from torch.distributed.device_mesh import DeviceMesh

CHECKED = {"diffusers": "0.42"}


def has_plan(model: ModelMixin) -> bool:
    """Whether the model declares which inputs are sharded and which outputs are gathered."""
    return model._cp_plan is not None


def gathers_in_layers(model: ModelMixin) -> bool:
    """Whether the plan gathers tokens within the layers of the model, not only at its end."""
    return any("." in name for name, what in model._cp_plan.items() if isinstance(what, ContextParallelOutput))


def is_parallel(model: ModelMixin) -> bool:
    return model._parallel_config is not None


def cut_by_plan(model: ModelMixin, mesh: DeviceMesh) -> None:
    """Shards the model's inputs and gathers its outputs over the ranks of a one-dimensional mesh."""
    config = ContextParallelConfig(ring_degree=mesh.size())  # only its mesh is read
    config._mesh = config._flattened_mesh = mesh
    apply_context_parallel(model, config, model._cp_plan)
    model._parallel_config = config


def new_backend(name: str, attend: Callable) -> AttentionBackendName:
    """A backend that calls `attend`, whose parameters are those that diffusers may pass."""
    backend = cast(AttentionBackendName, str.__new__(AttentionBackendName, name))
    backend._name_ = backend._value_ = str.__str__(backend)
    _AttentionBackendRegistry.register(backend)(attend)
    return backend


def takes_backend(processor: Any) -> bool:
    return hasattr(processor, "_attention_backend")


def backend_of(processor: Any) -> AttentionBackendName | None:
    return processor._attention_backend


def set_backend(processor: Any, backend: AttentionBackendName) -> None:
    processor._attention_backend = backend
