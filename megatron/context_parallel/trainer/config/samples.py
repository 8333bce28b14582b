"""How many samples an update, a run and the schedule of the learning rate have."""

from .flags import Flags


def batch_size(args: Flags, consumed: int) -> int:
    """Sequences of the update that follows `consumed` ones: all, or in even steps over those of the ramp-up."""
    if not args.rampup_batch_size:
        return args.global_batch_size
    start, increment, samples = args.rampup_batch_size
    steps = (args.global_batch_size - start) // increment
    return start + increment * (int(consumed / (samples / steps)) if consumed <= samples and steps else steps)


def iterations(args: Flags) -> int:
    """The whole batches that `--train-samples` hold."""
    assert args.train_samples is not None
    done = consumed = 0
    while (batch := batch_size(args, consumed)) < args.global_batch_size and consumed + batch <= args.train_samples:
        done, consumed = done + 1, consumed + batch
    return done + max(0, args.train_samples - consumed) // args.global_batch_size


def train_samples(args: Flags) -> int:
    """The samples that the training data of the whole run is made for."""
    return args.train_samples or args.train_iters * args.global_batch_size


def decay_samples(args: Flags) -> int:
    """The samples after which the learning rate is smallest."""
    by_iterations = (args.lr_decay_iters or 0) * args.global_batch_size
    return args.lr_decay_samples or by_iterations or train_samples(args)


def warmup_samples(args: Flags) -> float:
    """The samples after which the learning rate is largest."""
    if args.lr_warmup_fraction is not None:
        return args.lr_warmup_fraction * decay_samples(args)
    return args.lr_warmup_samples or args.lr_warmup_iters * args.global_batch_size
