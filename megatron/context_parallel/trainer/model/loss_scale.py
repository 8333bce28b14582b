"""The dynamic loss scale of `--fp16`, if experts have an optimizer of their own."""

from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig
from megatron.core.optimizer.grad_scaler import DynamicGradScaler


class SharedScale(DynamicGradScaler):
    """A loss scale for several optimizers: it changes when all of them have looked for gradients that overflow.

    megatron-core gives each optimizer a scale of its own, and multiplies the loss by that of the first. They drift
    apart, and the gradients of the others are then divided by a wrong number.
    """

    def __init__(self, config: OptimizerConfig, optimizers: int) -> None:
        super().__init__(
            initial_scale=config.initial_loss_scale,
            min_scale=config.min_loss_scale,
            growth_factor=2.0,  # and the next, as megatron-core sets them
            backoff_factor=0.5,
            growth_interval=config.loss_scale_window,
            hysteresis=config.hysteresis,
        )
        self._optimizers = optimizers
        self._found: list[bool] = []

    def update(self, found_inf: bool) -> None:
        """Each optimizer calls it once in a step, with whether one of its gradients overflowed."""
        self._found.append(found_inf)
        if len(self._found) == self._optimizers:
            super().update(any(self._found))
            self._found = []


def share_scale(optimizer: MegatronOptimizer) -> None:
    """Give all parts of an optimizer one dynamic loss scale. A constant one is the same already."""
    parts = getattr(optimizer, "chained_optimizers", [])
    if len(parts) > 1 and not optimizer.config.loss_scale:
        scale = SharedScale(optimizer.config, len(parts))
        for part in parts:
            part.grad_scaler = scale
