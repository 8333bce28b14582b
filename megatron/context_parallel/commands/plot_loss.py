"""Draw the loss curve of a run and print a summary.

RUN_DIR is the `--save` directory of the training run. Writes `RUN_DIR/loss.png` from `RUN_DIR/metrics.jsonl`.
"""

if __name__ == "__main__":  # python -m; before the imports, which may need an extra
    from megatron.context_parallel.commands import programs

    programs.plot_loss()

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from megatron.context_parallel.cli.flag import FlagSection, flag
from megatron.context_parallel.cli.flag_parser import FlagParser
from megatron.context_parallel.errors import UsageError

WINDOWS = 20  # number of windows of the smoothed curve
TRAINING, VALIDATION = "#0072B2", "#D55E00"


class PlotFlags(FlagSection):
    run_dir: Path = flag("the --save directory of a training run", option="RUN_DIR", example="runs/quickstart")


PARSER = FlagParser(PlotFlags, __doc__, "RUN_DIR", ["runs/quickstart"])


def read_metrics(run: Path) -> tuple[list[dict], list[dict]]:
    """The training lines and the validation lines of `metrics.jsonl` that have a loss, by iteration.

    Raises UsageError if the file is missing, damaged or has no training line.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise UsageError(f"RUN_DIR {run}: has no metrics.jsonl; give the --save directory of a training run")
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except json.JSONDecodeError as error:
        raise UsageError(f"RUN_DIR {run}: metrics.jsonl is damaged ({error}); remove the damaged line") from None
    lines.sort(key=lambda line: line["iteration"])  # --skip-train appends those of an earlier checkpoint
    training = [line for line in lines if line.get("lm_loss") is not None]
    if not training:
        raise UsageError(f"RUN_DIR {run}: has no loss yet; train for at least one --log-interval")
    return training, [line for line in lines if line.get("valid_loss") is not None]


def smoothed(losses: Sequence[float]) -> list[float]:
    """The centered moving average of the losses: over a twentieth of the run, and less near its ends."""
    half = len(losses) // WINDOWS // 2
    means = []
    for i in range(len(losses)):
        reach = min(half, i, len(losses) - 1 - i)
        means.append(statistics.fmean(losses[i - reach : i + reach + 1]))
    return means


def draw(training: list[dict], validation: list[dict], path: Path) -> None:
    """Write the curves of `lm_loss`, raw and smoothed, and of `valid_loss`, if there is any, to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    iterations = [m["iteration"] for m in training]
    losses = [m["lm_loss"] for m in training]
    axes.plot(iterations, losses, color=TRAINING, alpha=0.3, linewidth=1, label="training")
    axes.plot(iterations, smoothed(losses), color=TRAINING, linewidth=2, label="training, smoothed")
    if validation:
        found = [m["valid_loss"] for m in validation]
        axes.plot([m["iteration"] for m in validation], found, "o-", color=VALIDATION, label="validation")
    axes.set(xlabel="iteration", ylabel="loss (nats per token)", title=f"Loss of {path.absolute().parent.name}")
    axes.margins(x=0.02, y=0.05)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def summary(training: list[dict], validation: list[dict]) -> str:
    first, last = training[0], training[-1]
    # The first line includes the startup time.
    speed = statistics.median(m["tokens_per_second_per_rank"] for m in training[1:] or training)
    lines = [
        f"loss         {first['lm_loss']:.3f} at iteration {first['iteration']}, "
        f"{last['lm_loss']:.3f} at iteration {last['iteration']}"
    ]
    if validation:
        lines.append(f"validation   {validation[-1]['valid_loss']:.3f} at iteration {validation[-1]['iteration']}")
    lines.append(f"speed        {speed:.0f} tokens/s per rank, {last['step_time']:.2f} s per iteration")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    run = PARSER.parse(argv).run_dir
    training, validation = read_metrics(run)
    draw(training, validation, run / "loss.png")
    print(summary(training, validation))
    print(f"loss curve   {run / 'loss.png'}")
