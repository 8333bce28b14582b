"""Finds the fastest way to train a model on a cluster: strategies, ZeRO, recomputation and parallel sizes."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from megatron.context_parallel.cluster.description import BACKWARD, TENSOR_SHARE, Cluster, for_tensors
from megatron.context_parallel.cluster.step.attention_pass import (
    Attention,
    attention_mask,
    attention_seconds,
    attention_shape,
)
from megatron.context_parallel.cluster.step.memory import fullest
from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.cluster.step.stage_time import DATA_PARALLEL, EXPOSED, OPTIMIZER, AttentionTime
from megatron.context_parallel.cluster.step.step_time import StepForecast, check_sizes, forecast_step
from megatron.context_parallel.cluster.step.train_config import FULL_RECOMPUTE, SHARDING, TrainConfig, loss_chunk
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.options import divisors
from megatron.context_parallel.progress import tracked
from megatron.context_parallel.strategies import parse_spec

from .candidates import Rejected, Workload
from .plainness import plainest
from .planner import SIMULATED, GroupDevices, search

TAKEN = 8  # specs that a whole step is predicted with for each split of the ranks, beside one of each strategy
SIMULATED_OF_MANY = 8  # specs that are simulated for each of many splits
FAR = 1.25  # parallel sizes that must take so many times as long as the fastest run found are not tried
MICRO_BATCHES = (1, 2, 4)  # times the size that is given
STAGE_PARTS = (1, 2, 4)  # virtual stages of a pipeline rank


class FeasibleRun(NamedTuple):
    """A run that fits the cluster, and what an iteration of it takes. `placed`: batches of documents are placed."""

    run: TrainConfig
    forecast: StepForecast
    placed: bool = False

    @property
    def trains(self) -> bool:
        """Whether the trainer can run it."""
        if self.run.data_parallel_sharding_strategy in SHARDING[:2]:
            return True
        return self.run.fits_fsdp2 if self.run.use_torch_fsdp2 else self.run.fits_megatron_fsdp


@dataclass(frozen=True)
class StepSearch:
    """The result of `search_steps`.

    Attributes:
        ranked: runs that fit, fastest first.
        rejected: what cannot run, or does not fit the memory.
        slower: how many specs were not taken for a whole step.
        far: how many splits of the ranks were not tried, because they cannot be fast.
    """

    ranked: list[FeasibleRun]
    rejected: list[Rejected]
    slower: int
    far: int = 0

    @property
    def best(self) -> FeasibleRun | None:
        """The fastest run that the trainer can run; with a plainer strategy if that is about as fast."""
        fastest = next((one for one in self.ranked if one.trains), None)
        if fastest is None:
            return None
        alike = dict[str, FeasibleRun]()
        for one in self.ranked:
            if one.placed == fastest.placed and replace(one.run, cp_strategy=fastest.run.cp_strategy) == fastest.run:
                alike.setdefault(one.run.cp_strategy, one)
        return alike[plainest({spec: one.forecast.seconds for spec, one in alike.items()})]


def search_steps(model: ModelShape, cluster: Cluster, base: TrainConfig, every_split: bool = False) -> StepSearch:
    """Ranks the ways to train a model on all devices of a cluster.

    Args:
        model: what is trained.
        cluster: all of its devices are used.
        base: sequence, batch and dtype, and the parallel sizes.
        every_split: try all tensor-, context-, data- and pipeline-parallel sizes instead, and larger micro batches.
    """
    splits = [*_splits(model, cluster, base)] if every_split else [base]
    least = {split: _least(model, split, cluster) for split in splits} if every_split else {base: 0.0}
    ranked = list[FeasibleRun]()
    rejected = list[Rejected]()
    slower = far = 0
    for split in tracked(sorted(splits, key=least.__getitem__), "trying parallel sizes"):
        fastest = min((one.forecast.seconds for one in ranked if one.trains), default=math.inf)
        if least[split] > FAR * fastest:
            far += 1
            continue
        group, *others = split.groups("context")
        most = SIMULATED if len(splits) == 1 else SIMULATED_OF_MANY
        found = search(workload_of(model, split), GroupDevices(cluster, group, others), max_simulated=most)
        rejected += found.rejected
        specs = _taken([*found.ranked], found.slower)
        slower += len(found.ranked) + len(found.slower) - len(specs)
        for spec in tracked(specs, "predicting whole iterations"):
            of_spec = forecasts(model, replace(split, cp_strategy=spec), cluster)
            ranked += of_spec.ranked
            rejected += of_spec.rejected
    return StepSearch(sorted(ranked, key=lambda found: found.forecast.seconds), rejected, slower, far)


def _least(model: ModelShape, run: TrainConfig, cluster: Cluster) -> float:
    """Seconds that every iteration of a run takes, in which no communication of attention or of weights is exposed."""
    rate = 1e12 * max(max(rate.forward_TFLOP_s, rate.backward_TFLOP_s) for rate in cluster.device.attention)
    window = min(model.window_size or run.seq_length, run.seq_length)
    pairs = run.micro_batch_size * (run.seq_length * window - window**2 / 2)  # of tokens
    width = model.queries / run.tensor_model_parallel_size
    forward = 4 * width * pairs / run.context_parallel_size / rate

    def ideal(model: ModelShape, run: TrainConfig, cluster: Cluster, backward: bool) -> Attention:
        return Attention(forward * (BACKWARD if backward else 1), 0.0, 0.0, 0.0)

    least = math.inf
    for stages in _virtual_stages(model, run, cluster):
        parts = forecast_step(model, replace(run, **stages), cluster, ideal).parts
        left_out = EXPOSED, DATA_PARALLEL, OPTIMIZER
        least = min(least, sum(seconds for what, seconds in parts.items() if what not in left_out))
    return least


def _taken(ranked: list[str], slower: dict[str, float]) -> list[str]:
    """The fastest specs, and one of each strategy that is not among them: the fastest, or else the plainest likely one.

    `ranked` has the fastest first, `slower` the lower bounds of others.
    """
    taken = ranked[:TAKEN]
    names = {_strategy_of(spec) for spec in taken}
    for spec in ranked[TAKEN:]:
        if (name := _strategy_of(spec)) not in names:
            names.add(name)
            taken.append(spec)
    others = defaultdict[str, dict[str, float]](dict)
    for spec, least in slower.items():
        if (name := _strategy_of(spec)) not in names:
            others[name][spec] = least
    return taken + [plainest(specs) for specs in others.values()]


def _strategy_of(spec: str) -> str:
    return parse_spec(spec).strategy.name


def workload_of(model: ModelShape, run: TrainConfig) -> Workload:
    """The attention of a layer and micro batch."""
    shape = attention_shape(model, run)
    sizes = run.seq_length, shape.heads, shape.kv_heads, shape.head_dim
    return Workload(*sizes, run.micro_batch_size, run.dtype, attention_mask(model))


def forecasts(
    model: ModelShape,
    base: TrainConfig,
    cluster: Cluster,
    attention: AttentionTime = attention_seconds,
    placed: bool = False,
) -> StepSearch:
    """Whole iterations of a run with every value of the `DIMENSIONS`, in any order."""
    found = StepSearch([], [], 0)
    chunk = loss_chunk(model.padded_vocab_size // base.tensor_model_parallel_size)
    for run in _variants(model, replace(base, cross_entropy_chunk_size=chunk), cluster):
        try:
            check_sizes(model, run)
            if fullest(model, run)[1].bytes > for_tensors(cluster.device.memory_GiB):
                memory = f"{cluster.device.memory_GiB:g} GiB of a device"
                raise UsageError(f"needs more than {TENSOR_SHARE:.0%} of the {memory}")
            found.ranked.append(FeasibleRun(run, forecast_step(model, run, cluster, attention), placed))
        except UsageError as error:
            found.rejected.append(Rejected(run.cp_strategy, str(error)))
    return found


Values = Iterator[dict[str, Any]]  # fields of a `TrainConfig`


def _shardings(model: ModelShape, run: TrainConfig, cluster: Cluster) -> Values:
    kinds = SHARDING[:1] if run.sharers == 1 else SHARDING[:2] if model.expert_model_parallel_size > 1 else SHARDING
    for sharding in kinds:  # sharded experts were not tested with the others
        for copies in _copies(run, cluster) if sharding == "optim" else (1,):
            yield {
                "data_parallel_sharding_strategy": sharding,
                "use_torch_fsdp2": sharding == SHARDING[-1] and _needs_fsdp2(model, run, cluster),
                "num_distributed_optimizer_instances": copies,
                "overlap_grad_reduce": run.sharers > 1,
                "overlap_param_gather": sharding in ("optim", "optim_grads_params"),  # as `run_of`
            }


def _needs_fsdp2(model: ModelShape, run: TrainConfig, cluster: Cluster) -> bool:
    """Whether FSDP2 can shard the weights, and Megatron-FSDP cannot, on whose ranks the whole model is built first."""
    tensor = run.tensor_model_parallel_size
    whole = model.parameters_on_stage(0, 1, tensor) * run.itemsize
    large = whole > for_tensors(cluster.device.memory_GiB)
    return run.pipeline_model_parallel_size == 1 and (tensor > 1 or large)


def _copies(run: TrainConfig, cluster: Cluster) -> Iterator[int]:
    """Copies of a sharded optimizer: one, and where ranks of several nodes share weights, one in each node (HSDP)."""
    yield 1
    of_node, over = divmod(cluster.devices_per_node, run.tensor_model_parallel_size)
    if not over and 1 < of_node < run.sharers and run.sharers % of_node == 0:
        yield run.sharers // of_node


def _recomputations(model: ModelShape, run: TrainConfig, cluster: Cluster) -> Values:
    """Nothing, norms and MLP, all but attention, or all; what the last two keep, on the device or in host memory.

    The trainer refuses all but nothing and all with FP8, and host memory.
    """
    yield {}
    yield FULL_RECOMPUTE
    if run.fp8:
        return
    modules = "layernorm", "moe" if model.num_experts else "mlp"
    yield {"recompute_granularity": "selective", "recompute_modules": modules}
    but_attention = {**FULL_RECOMPUTE, "recompute_whitelist": ("core_attention",)}
    yield but_attention
    if cluster.device.host_GB_s:
        yield {**FULL_RECOMPUTE, "offload_checkpoints": True}
        yield {**but_attention, "offload_checkpoints": True, "offload_kept": True}


def _virtual_stages(model: ModelShape, run: TrainConfig, cluster: Cluster) -> Values:
    """Parts of a pipeline stage. Megatron interleaves them if its stages divide the micro batches."""
    stages = run.pipeline_model_parallel_size
    for parts in STAGE_PARTS if stages > 1 and run.micro_batches % stages == 0 else (1,):
        if model.num_layers % (stages * parts) == 0:
            yield {"virtual_pipeline_model_parallel_size": parts if parts > 1 else None}


DIMENSIONS = (_shardings, _recomputations, _virtual_stages)  # searched for each strategy and split of the ranks


def _variants(model: ModelShape, run: TrainConfig, cluster: Cluster) -> Iterator[TrainConfig]:
    """A run with every combination of values of the dimensions."""
    for values in product(*(dimension(model, run, cluster) for dimension in DIMENSIONS)):
        fields = dict[str, Any]()
        for of_dimension in values:
            fields |= of_dimension
        yield replace(run, **fields)


def _splits(model: ModelShape, cluster: Cluster, base: TrainConfig) -> Iterator[TrainConfig]:
    """All parallel sizes that use all devices, and larger micro batches; tensor-parallel ranks stay in a node."""
    for tensor in divisors(cluster.devices_per_node):
        groups = model.num_query_groups
        split = (model.num_attention_heads, model.ffn_hidden_size)
        if any(size % tensor for size in split) or (groups % tensor and tensor % groups):
            continue
        for pipeline in divisors(model.num_layers):
            left, over = divmod(cluster.ranks, tensor * pipeline)
            for context in () if over else divisors(left):
                data = left // context
                for times in MICRO_BATCHES:
                    micro = times * base.micro_batch_size
                    if base.seq_length % context or base.global_batch_size % (micro * data):
                        continue
                    yield replace(
                        base,
                        micro_batch_size=micro,
                        tensor_model_parallel_size=tensor,
                        pipeline_model_parallel_size=pipeline,
                        context_parallel_size=context,
                        data_parallel_size=data,
                        sequence_parallel=tensor > 1,
                    )
