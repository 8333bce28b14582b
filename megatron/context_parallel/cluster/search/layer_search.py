"""Finds the fastest strategy for a model with windows in some of its layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron.context_parallel.cluster.step.attention_pass import attention_buffers, attention_seconds
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.train_config import TrainConfig

from .planner import GroupDevices, PassPrediction, Prediction, SearchResult, search
from .step_search import TAKEN, workload_of


def search_layers(
    model: ModelShape, run: TrainConfig, group: GroupDevices, fixed: Mapping[str, Any], room: float
) -> SearchResult:
    """Ranks what is fastest for either kind of layers by the mean time of all layers.

    Args:
        model, run: the attention; rank r of the run is device r of the cluster.
        group, fixed, room: as in `search`.
    """
    kinds = replace(model, window_size=None, full_layers=0), replace(model, full_layers=0)
    share = model.full_layers / model.num_layers
    shares = share, 1 - share
    searches = [search(workload_of(kind, run), group, fixed, room) for kind in kinds]
    ranked = dict[str, Prediction]()
    for spec in dict.fromkeys(spec for found in searches for spec in [*found.ranked][:TAKEN]):
        own = replace(run, cp_strategy=spec)
        memory = max(attention_buffers(kind, own) for kind in kinds)
        if memory > room:
            continue
        passes = []
        for backward in (False, True):
            found = [attention_seconds(kind, own, group.cluster, backward) for kind in kinds]
            seconds = sum(part * one.seconds for part, one in zip(shares, found, strict=True))
            exposed = sum(part * one.exposed for part, one in zip(shares, found, strict=True))
            passes.append(PassPrediction(seconds, exposed, memory))
        ranked[spec] = Prediction(tuple(passes))
    slower = {spec: least for found in searches for spec, least in found.slower.items() if spec not in ranked}
    fastest_first = dict(sorted(ranked.items(), key=lambda item: item[1].seconds))
    return SearchResult(fastest_first, slower, [one for found in searches for one in found.rejected])
