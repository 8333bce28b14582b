"""Draws the loss curve of a run: `cp-plot-loss`, from a checkout."""

from megatron.context_parallel.commands.programs import plot_loss

if __name__ == "__main__":
    plot_loss()
