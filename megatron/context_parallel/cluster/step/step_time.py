"""The time of one training iteration on a cluster: seconds by kind, MFU and memory."""

from dataclasses import dataclass

from megatron.context_parallel.cluster.description import Cluster, for_tensors
from megatron.context_parallel.errors import UsageError

from .attention_pass import attention_seconds
from .memory import fullest
from .model_shape import ModelShape
from .moment import Moment
from .stage_time import BUBBLE, KINDS, PIPELINE, AttentionTime, StageTime
from .train_config import TrainConfig


@dataclass(frozen=True)
class StepForecast:
    """One iteration: a global batch, forward and backward, and the update of the weights.

    Attributes:
        seconds: of an iteration.
        parts: the seconds by kind (`KINDS`), of a rank of the slowest pipeline stage. They add up to `seconds`.
        mfu: the model's operations (`ModelShape.flops`) as a part of what the devices' peak allows.
        memory: the moment at which a rank of the stage that needs the most has the most memory.
        fits: whether the devices have enough memory.
    """

    seconds: float
    parts: dict[str, float]
    mfu: float
    memory: Moment
    fits: bool


def forecast_step(
    model: ModelShape, run: TrainConfig, cluster: Cluster, attention: AttentionTime = attention_seconds
) -> StepForecast:
    """Predicts an iteration of a run.

    Rank r is device r of the cluster, counted node by node; ranks are in Megatron's order tp-cp-dp-pp.

    Args:
        model: what is trained.
        run: how it is trained.
        cluster: its nodes, as many as the run needs.
        attention: the time of attention; default: of whole sequences.

    Raises:
        UsageError: sizes that do not fit each other, or the cluster.
    """
    cluster = cluster.part(run.world_size)
    check_sizes(model, run)
    last = run.pipeline_model_parallel_size - 1
    known = {stage: StageTime(model, run, cluster, stage, attention) for stage in {0, min(1, last), last}}
    stages = [known[stage if stage in known else 1] for stage in range(last + 1)]  # those in the middle are alike
    micro = [sum(stage.micro_batch.values()) for stage in stages]
    slowest = max(range(len(stages)), key=lambda stage: micro[stage])
    parts = dict.fromkeys(KINDS, 0.0) | {k: v * run.micro_batches for k, v in stages[slowest].micro_batch.items()}
    parts[PIPELINE] += stages[slowest].filling
    parts[BUBBLE] = (sum(micro) - micro[slowest]) / run.virtual_stages
    parts |= stages[slowest].once
    seconds = sum(parts.values())
    flops = model.flops_per_sequence(run.seq_length) * run.global_batch_size
    _, busiest = fullest(model, run)
    return StepForecast(
        seconds=seconds,
        parts=parts,
        mfu=flops / (seconds * run.world_size * cluster.device.peak_TFLOP_s * 1e12),
        memory=busiest,
        fits=busiest.bytes <= for_tensors(cluster.device.memory_GiB),
    )


def check_sizes(model: ModelShape, run: TrainConfig) -> None:
    """Raises UsageError if the parallel sizes do not divide the model's."""
    for name, value, flag, size in (
        ("--num-layers", model.num_layers, "--pipeline-model-parallel-size", run.pipeline_model_parallel_size),
        (
            "--num-attention-heads",
            model.num_attention_heads,
            "--tensor-model-parallel-size",
            run.tensor_model_parallel_size,
        ),
        ("--ffn-hidden-size", model.ffn_hidden_size, "--tensor-model-parallel-size", run.tensor_model_parallel_size),
    ):
        if value % size:
            raise UsageError(f"{flag} {size}: does not divide {name} {value}; give a divisor, such as 1")
