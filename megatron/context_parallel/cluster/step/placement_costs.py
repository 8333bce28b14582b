"""What a placement of documents costs on a cluster, as the numbers that the solver minimises."""

from dataclasses import replace

from megatron.context_parallel.cluster.description import BACKWARD, Cluster
from megatron.context_parallel.cluster.simulate.block_time import rate_at
from megatron.context_parallel.plan.ir import HEAD_FIRST
from megatron.context_parallel.plan.volume import Shape
from megatron.context_parallel.strategies import parse_spec
from megatron.context_parallel.tokens.place_documents import Costs

from .attention_pass import attention_shape
from .model_shape import ModelShape
from .train_config import TrainConfig

PASSES = 2  # keys and values are sent in both


def placement_costs(shape: Shape, cluster: Cluster, dtype: str = "bf16", ranks_per_node: int | None = None) -> Costs:
    """Seconds of a pair and of a row of keys, if all devices of a node send at once. Latencies are left out.

    Args:
        shape: the sizes of the attention on a rank.
        cluster: the cluster.
        dtype: of the model.
        ranks_per_node: context ranks on a node; default: its devices.
    """
    operations = 2 * shape.heads * (shape.head_dim + (shape.value_dim or shape.head_dim))
    forward, backward = (
        rate_at(cluster.device, dtype, shape.head_dim, False, shape.rows, backward) for backward in (False, True)
    )
    row = PASSES * shape.kv_heads * (shape.head_dim + (shape.value_dim or shape.head_dim)) * shape.itemsize
    devices = cluster.devices_per_node
    inside, nics = cluster.inside, cluster.nics
    return Costs(
        operations / forward + BACKWARD * operations / backward,
        row / (inside.GB_s * 1e9 / (devices if inside.shared else 1)) if inside else 0.0,
        row / (nics.GB_s * 1e9 * nics.per_node / devices) if nics else 0.0,
        ranks_per_node or devices,
    )


def costs_of_run(model: ModelShape, run: TrainConfig, cluster: Cluster) -> Costs:
    """The costs of a placement for the attention of a run, on the context ranks of one head group."""
    plan = parse_spec(run.cp_strategy).plan(run.context_parallel_size)
    shape = attention_shape(model, run)
    heads, kv_heads = shape.heads // plan.head_parallel_size, max(1, shape.kv_heads // plan.head_parallel_size)
    apart = run.tensor_model_parallel_size * (plan.head_parallel_size if plan.placement == HEAD_FIRST else 1)
    ranks_per_node = max(1, cluster.devices_per_node // apart)
    return placement_costs(replace(shape, heads=heads, kv_heads=kv_heads), cluster, run.dtype, ranks_per_node)
