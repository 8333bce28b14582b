"""Random lengths, batches and learning rates of a run, with the numbers that its log must have."""

import math
from dataclasses import dataclass
from random import Random


@dataclass
class Schedule:
    """What a run does in which iteration.

    Attributes:
        flags: the command line.
        batches: sequences of each iteration.
        style: of the decay; highest, lowest: learning rates.
        warmup, decay: after how many sequences the rate is highest, and lowest.
        evaluated: every how many iterations; 0: never.
    """

    flags: str
    batches: list[int]
    style: str
    highest: float
    lowest: float
    warmup: float
    decay: int
    evaluated: int

    def rate(self, updated: int) -> float:
        """The learning rate after updates with so many sequences."""
        if self.warmup and updated <= self.warmup:
            return self.highest * updated / self.warmup
        if self.style == "constant":
            return self.highest
        if updated > self.decay:
            return self.lowest
        if self.style == "inverse-square-root":
            return max(self.lowest, self.highest * math.sqrt(max(self.warmup, 1)) / math.sqrt(max(updated, 1)))
        share = (updated - self.warmup) / (self.decay - self.warmup)
        left = 1 - share if self.style == "linear" else (1 + math.cos(math.pi * share)) / 2
        return self.lowest + left * (self.highest - self.lowest)


def draw_schedule(random: Random, highest: float, batch: int) -> Schedule:
    """Four iterations of `batch` sequences, or two of half as many and two of these."""
    style = random.choice(("linear", "cosine", "constant", "inverse-square-root"))
    lowest = random.choice((0.0, 0.1 * highest))
    flags = f"--global-batch-size {batch} --lr {highest} --min-lr {lowest} --lr-decay-style {style}"
    batches, decay, warmup = [batch] * 4, random.choice((4, 4, 3, 6)), random.choice((0, 0, 1, 2))
    if random.random() < 0.6:
        flags += f" --train-iters 4 --lr-decay-iters {decay}"
        unit, each = "iters", batch
    else:
        unit, each = "samples", 1
        decay, warmup = batch * decay - random.choice((0, 3)), random.choice((0, batch - 3, 2 * batch))
        if random.random() < 0.5:
            half = batch // 2
            batches = [half, half, batch, batch]
            flags += f" --rampup-batch-size {half} {half} {batch}"
        flags += f" --train-samples {sum(batches)} --lr-decay-samples {decay}"
    if random.random() < 0.3:
        flags += " --lr-warmup-fraction 0.25"
        warmup, each_of_warmup = 0.25 * decay * each, 1
    else:
        flags += f" --lr-warmup-{unit} {warmup}"
        each_of_warmup = each
    evaluated = random.choice((0, 1, 2))
    flags += f" --eval-iters 1 --eval-interval {evaluated}" if evaluated else " --eval-iters 0"
    return Schedule(flags, batches, style, highest, lowest, warmup * each_of_warmup, decay * each, evaluated)
