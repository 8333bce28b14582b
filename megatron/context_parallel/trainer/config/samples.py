"""The numbers of samples of an update, a run and the learning-rate schedule."""

from .flags import Flags


def batch_size(args: Flags, consumed: int) -> int:
    """The batch size after `consumed` samples: the global batch size, or a step of the ramp-up."""
    if not args.rampup_batch_size:
        return args.global_batch_size
    start, increment, samples = args.rampup_batch_size
    steps = (args.global_batch_size - start) // increment
    return start + increment * (int(consumed / (samples / steps)) if consumed <= samples and steps else steps)


def iterations(args: Flags) -> int:
    """The number of whole batches in `--train-samples`."""
    assert args.train_samples is not None
    done = consumed = 0
    while (batch := batch_size(args, consumed)) < args.global_batch_size and consumed + batch <= args.train_samples:
        done, consumed = done + 1, consumed + batch
    return done + max(0, args.train_samples - consumed) // args.global_batch_size


def train_samples(args: Flags) -> int:
    """The number of training samples of the whole run."""
    return args.train_samples or args.train_iters * args.global_batch_size


def decay_samples(args: Flags) -> int:
    """The number of samples after which the learning rate is at its minimum."""
    by_iterations = (args.lr_decay_iters or 0) * args.global_batch_size
    return args.lr_decay_samples or by_iterations or train_samples(args)


def warmup_samples(args: Flags) -> float:
    """The number of samples after which the learning rate is at its maximum."""
    if args.lr_warmup_fraction is not None:
        return args.lr_warmup_fraction * decay_samples(args)
    return args.lr_warmup_samples or args.lr_warmup_iters * args.global_batch_size
