"""The memory of one rank in training: the largest of named moments of a step, by kind.

On a CPU the moments are those of the allocator's peaks (`benchmarks/memory.py`). On a GPU they are read in sources.
"""

from dataclasses import replace

from . import saved_bytes
from .fsdp2_memory import fsdp2_moments
from .layers_memory import LayersMemory, micro_batches_in_flight
from .model_shape import ModelShape
from .moment import ATTENTION, BUILDING, GATHERED, GRADIENTS, MLP, OPTIMIZER, OUTPUT, REDUCTION, MemoryItem, Moment
from .states_memory import inputs_of, states_of, update_of, waiting_gradients
from .train_config import TrainConfig
from .work_memory import attention_backward, mlp_backward, output_and_loss, residual_gradient

OPTIMIZER_ON_HOST = 4 * 4  # bytes of a parameter: float32 copy, gradient and two moments


def peak(model: ModelShape, run: TrainConfig, stage: int = 0) -> Moment:
    """The moment at which a rank of pipeline stage `stage` (0 first) has the most memory."""
    return max(moments(model, run, stage), key=lambda moment: moment.bytes)


def fullest(model: ModelShape, run: TrainConfig) -> tuple[int, Moment]:
    """The pipeline stage whose ranks need the most memory, and the moment at which they do."""
    peaks = [(stage, peak(model, run, stage)) for stage in range(run.pipeline_model_parallel_size)]
    return max(peaks, key=lambda one: one[1].bytes)


def moments(model: ModelShape, run: TrainConfig, stage: int = 0) -> list[Moment]:
    """All moments of a rank of pipeline stage `stage`, in their order after the forward pass of the layers."""
    if run.use_torch_fsdp2:
        return list(fsdp2_moments(model, run))
    stages, tensor = run.pipeline_model_parallel_size, run.tensor_model_parallel_size
    parameters = model.parameters_on_stage(stage, stages, tensor, model.expert_model_parallel_size)
    # The optimizer of all experts is sharded over data x context ranks, whether experts are sharded or not.
    updated = model.parameters_on_stage(stage, stages, tensor) if run.shards("optim") > 1 else parameters
    states = list(states_of(model, run, parameters, updated))
    inputs = states + list(inputs_of(model, run, stage))
    layers = LayersMemory(model, run)
    found, in_flight = [], micro_batches_in_flight(run, stage)
    if run.shards("params") > 1:
        whole = f"{parameters:,} parameters x {run.itemsize} bytes that Megatron-FSDP has not sharded yet"
        found.append(Moment(BUILDING, [MemoryItem("whole weights", parameters * run.itemsize, whole)]))
    if stage == stages - 1:
        found.append(Moment(OUTPUT, [*inputs, *layers.kept(in_flight), output_and_loss(model, run)]))
    found.append(Moment(MLP, [*inputs, *layers.at_work(in_flight, 0), mlp_backward(model, run)]))
    attention = [residual_gradient(model, run), attention_backward(model, run)]
    found.append(Moment(ATTENTION, [*inputs, *layers.at_work(in_flight, 1), *attention]))
    if run.on_cpu and run.shards("optim") > run.shards("grads"):
        copy = MemoryItem(REDUCTION, 4 * parameters, "gloo's reduce-scatter copies the gradients")
        found.append(Moment(REDUCTION, [*states, copy]))
    resting = [item for item in states if item.what not in (GATHERED, GRADIENTS)]
    if run.shards("grads") > 1:
        found.append(Moment(GRADIENTS, [*resting, waiting_gradients(model, run, parameters)]))
    found.append(Moment(OPTIMIZER, [*resting, update_of(model, run, updated)]))
    return found


def host_memory(model: ModelShape, run: TrainConfig, stage: int = 0) -> int:
    """Bytes of host memory for what a rank of pipeline stage `stage` offloads."""
    on_device = replace(run, offload_checkpoints=False, offload_kept=False)
    in_flight = micro_batches_in_flight(run, stage)
    whole = sum(item.bytes for item in LayersMemory(model, on_device).inputs(in_flight))
    left = sum(item.bytes for item in LayersMemory(model, run).inputs(in_flight))
    stages, tensor = run.pipeline_model_parallel_size, run.tensor_model_parallel_size
    updated = model.parameters_on_stage(stage, stages, tensor) * run.optimizer_on_host / run.shards("optim")
    parts = LayersMemory(model, run).offloaded(in_flight, 1) * saved_bytes.offloaded(model, run)[1]
    return whole - left + round(parts + OPTIMIZER_ON_HOST * updated)
