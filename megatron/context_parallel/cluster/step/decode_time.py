"""The time of a decoding step on a cluster: a memory roofline, plus launches and messages.

Batches are so small that all time is spent on reading weights and cached keys, on launching kernels from a graph, and
on the latency of messages.
"""

import math
from typing import NamedTuple

from megatron.context_parallel.cluster.description import Cluster

from .model_shape import ModelShape
from .train_config import TrainConfig

KERNELS = 11  # of a layer beside attention, as in `LayerTime`
MERGE_KERNELS = 4  # permute, pack, unpack and merge partial outputs


class DecodeForecast(NamedTuple):
    """Seconds.

    Attributes:
        block: one call of the attention kernel.
        blocks: all calls of a layer, one for each rank's queries.
        sent: messages of queries of a layer, one after the other.
        exchanged: partial outputs of a layer, and then their log-sum-exp, to their owners.
        attention: of a layer, with its messages.
        step: all layers and the logits: the time between two tokens (TTIT).
    """

    block: float
    blocks: float
    sent: float
    exchanged: float
    attention: float
    step: float


def decode_step(
    model: ModelShape, run: TrainConfig, cluster: Cluster, context: int, batch: int = 1, mlp_itemsize: int | None = None
) -> DecodeForecast:
    """Predicts a step of decoding with pass-Q (Yang et al. 2024, Algorithm 4): queries move around the context ranks.

    Args:
        model: its sizes.
        run: its context and tensor ranks and its dtype count. Rank r is device r; tensor ranks are neighbours.
        cluster: its nodes, as many as the run needs.
        context: cached tokens of each sequence.
        batch: sequences. Each context rank has the queries of as many, rounded up.
        mlp_itemsize: bytes of a weight of the MLP; default: as the others.
    """
    cluster = cluster.part(run.world_size)
    n = run.context_parallel_size
    device = cluster.device
    memory = cluster.device.memory_GB_s * 1e9
    rows = -(-batch // n)  # of a rank
    heads, kv_heads = (
        max(1, count // run.tensor_model_parallel_size) for count in (model.num_attention_heads, model.num_query_groups)
    )
    keys = rows * context / n * 2 * kv_heads * model.kv_channels * run.itemsize
    block = max(device.block_us * 1e-6, keys / memory)
    hop = _message(cluster, n, run, rows * heads * model.kv_channels * run.itemsize)
    partials = (n - 1) * rows * heads
    outputs, statistics = partials * model.kv_channels * run.itemsize, partials * 4
    exchanged = _message(cluster, n, run, outputs) + _message(cluster, n, run, statistics)
    merging = MERGE_KERNELS * device.kernel_us * 1e-6 if n > 1 else 0.0
    attention = (n - 1) * max(block, hop) + block + exchanged + merging
    layer = _weights(model, run, mlp_itemsize or run.itemsize) / memory + KERNELS * device.kernel_us * 1e-6
    layer += 2 * _sum(cluster, run, rows * model.hidden_size * run.itemsize)
    table = model.padded_vocab_size * model.hidden_size * run.itemsize / run.tensor_model_parallel_size
    step = model.num_layers * (layer + attention) + table / memory
    return DecodeForecast(block, n * block, (n - 1) * hop, exchanged, attention, step)


def _weights(model: ModelShape, run: TrainConfig, mlp_itemsize: int) -> float:
    """Bytes of a layer's weights on a rank."""
    attention = model.hidden_size * (2 * model.queries + 2 * model.keys) * run.itemsize
    mlp = model.hidden_size * (model.mlp_inputs + model.ffn_hidden_size) * mlp_itemsize
    return (attention + mlp) / run.tensor_model_parallel_size


def _message(cluster: Cluster, n: int, run: TrainConfig, size: float) -> float:
    """Seconds of a message from each context rank to the next, which is on another node if there is one."""
    if n == 1:
        return 0.0
    link = cluster.nics if cluster.nics and run.world_size > cluster.devices_per_node else cluster.inside
    assert link  # as above
    return link.latency_us * 1e-6 + size / ((link.stream_GB_s or link.GB_s) * 1e9)


def _sum(cluster: Cluster, run: TrainConfig, size: float) -> float:
    """Seconds of an all-reduce among tensor ranks: up and down a tree inside nodes and between them."""
    ranks = run.tensor_model_parallel_size
    if ranks == 1:
        return 0.0
    inside, nodes = min(ranks, cluster.devices_per_node), max(1, ranks // cluster.devices_per_node)
    seconds = 0.0
    for members, link in ((inside, cluster.inside), (nodes, cluster.nics)):
        if members > 1:
            assert link  # a cluster of more than one device, or node, has it
            seconds += 2 * math.ceil(math.log2(members)) * (link.latency_us * 1e-6 + size / (link.GB_s * 1e9))
    return seconds
