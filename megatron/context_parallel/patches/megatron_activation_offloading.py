"""Pauses megatron-core's offloading of activations, which expects the passes of the first training step again."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager
from megatron.core.transformer import TransformerConfig

CHECKED = {"megatron-core": "0.16 to 0.19"}


@contextmanager
def offloading_paused(config: TransformerConfig) -> Iterator[None]:
    """Passes inside are not of a training step: nothing is offloaded, and none of them is counted."""
    if not config.fine_grained_activation_offloading:
        yield
        return
    manager = PipelineOffloadManager.get_instance()
    config.fine_grained_activation_offloading = False
    manager.disable_offload()
    try:
        yield
    finally:
        config.fine_grained_activation_offloading = True
        manager.enable_offload()
