"""Parts of a rank's tokens that an MLP computes in turn, as given or by default."""

from .model_shape import ModelShape
from .train_config import TrainConfig

MLP_AT_ONCE = 2**29  # bytes of the outputs of an MLP's first product


def mlp_chunks(model: ModelShape, run: TrainConfig) -> int:
    """The chunks of each MLP (`--mlp-chunks-for-training`). By default they are made only where they cost no time."""
    if run.mlp_chunks_for_training:
        return run.mlp_chunks_for_training
    kept = {"fc1", "fc2"} & {*run.recompute_whitelist}
    if model.num_experts or run.fp8 or kept or not recomputed_anyway(run):
        return 1
    outputs = run.tokens * run.itemsize * model.mlp_inputs // run.tensor_model_parallel_size
    return max(1, -(-outputs // MLP_AT_ONCE))


def recomputed_anyway(run: TrainConfig) -> bool:
    """Whether the backward pass computes each MLP once more anyway, with or without chunks.

    A recomputed layer does not need the output of its MLP, if no other layer is recomputed with it.
    """
    each_layer = run.recompute_granularity == "full" and run.recompute_method == "uniform"
    return (each_layer and run.recompute_num_layers == 1) or "mlp" in run.computed_again
