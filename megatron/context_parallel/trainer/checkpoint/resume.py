"""A resumed run must have the model of its checkpoint and, unless told otherwise, the same order of data."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from megatron.context_parallel.cli.flag import Flag
from megatron.context_parallel.cli.flag_checks import refuse
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.config.flags import (
    FLAGS,
    Arguments,
    LearningRate,
    MixedPrecision,
    Regularization,
)
from megatron.context_parallel.trainer.config.samples import train_samples

from .data_digest import Digests, changed, data_digests
from .store import plain_args, saves_where_it_loads

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from .train_state import Progress

# Flags that may differ, but change the resumed run. Data paths for evaluation, logs and loaders do not.
_TOLD = (
    *Regularization.declared,
    *LearningRate.declared,
    *MixedPrecision.declared,
    "global_batch_size",
    "train_iters",
    "train_samples",
    "tokenizer_model",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_PROBES = 64  # samples of a data set that are compared


def check_resume(args: Arguments, saved: dict) -> str | None:
    """Compare `args` with those `saved` in the checkpoint of `--load`.

    Returns a line with the values that changed, or None if none did.

    Raises:
        UsageError: a flag that decides the model or the order of the data has another value.
    """
    if "converted_from" in saved and not args.finetune:
        why = f"its weights were converted from {saved['converted_from']}, so there is no run to resume"
        refuse(args, "load", f"{why}; add --finetune")
    _check_optimizer(args, saved)
    refused = _decisions(args, saved)
    now = plain_args(args)
    _check_start(args, saved, now)
    told = []
    for name, flag in FLAGS.items():
        if name not in saved or name not in now or saved[name] == now[name]:
            continue
        if flag.decides in refused:
            _refuse(args, flag, now[name], saved[name])
        if flag.decides == "model" or (not args.finetune and (name in _TOLD or flag.decides == "data order")):
            told.append(f"{_written(flag, now[name])} (was {_short(flag, saved[name])})")
    what = "finetuning" if args.finetune else "resuming"
    return f"{what} with changed flags: {', '.join(told)}" if told else None


def _check_optimizer(args: Arguments, saved: dict) -> None:
    restored = not (args.finetune or args.no_load_optim or saved.get("no_save_optim"))
    if restored and saved.get("use_distributed_optimizer") is False and "use_torch_fsdp2" not in saved:
        why = "it was saved without --use-distributed-optimizer by a version with another optimizer format"
        raise UsageError(f"--load {args.load}: {why}; give --no-load-optim")


def _check_start(args: Arguments, saved: dict, now: dict) -> None:
    """Reject what would continue the run from another point than that of the checkpoint."""
    if args.finetune:
        if saved.get("finetune") and saves_where_it_loads(args):
            why = f"--load {args.load} and --save are the folder of a run with this flag, which would begin anew"
            raise UsageError(f"--finetune: {why}; leave it out to resume, or give another --save")
        return
    for name in ("global_batch_size", "rampup_batch_size") if args.train_samples else ():
        before = saved.get(name, now[name])
        if before != now[name]:
            flag = FLAGS[name]
            advice = f"leave out {flag.option}" if before is None else f"give {_written(flag, before)}"
            why = f"the checkpoint was saved with {_written(flag, before)}, and --train-samples counts such batches"
            raise UsageError(f"{_written(flag, now[name])}: {why}; {advice}, or --train-iters")


def _decisions(args: Arguments, saved: dict) -> set[str]:
    """The decisions of flags that must be as in the checkpoint."""
    decisions = {"weights"}
    if args.position_embedding_type == "learned_absolute":
        decisions.add("position table")
    if not args.finetune:
        decisions.add("model")
        if not args.override_data_order:
            decisions.add("data order")
    return decisions


def check_samples(args: Arguments, saved: dict, iteration: int, consumed: int) -> None:
    """Reject a global batch so small that more samples were consumed than the finished iterations would hold.

    Raises:
        UsageError: `consumed` is more than `iteration` batches hold.
    """
    if consumed > iteration * args.global_batch_size:
        why = f"{consumed} samples were consumed in {iteration} iterations, more than batches of this size hold"
        refuse(args, "global_batch_size", why, global_batch_size=saved["global_batch_size"])


def same_data(args: Arguments, progress: "Progress") -> Digests:
    """The checksums of the training data, if they match the checkpoint. One rank calls it.

    Raises:
        UsageError: a file has other documents, or other tokens in the compared parts.
        OSError: a file cannot be read.
    """
    digests = data_digests(args)
    difference = changed(args, progress.train_data, digests)
    if difference and progress.consumed_train_samples and not args.override_data_order:
        name = "train_data_path" if args.train_data_path else "data_path"
        why = f"{difference} than the run in --load {args.load} was trained on"
        refuse(args, name, f"{why}; give the original data, or --override-data-order")
    return digests


def check_shuffle(
    args: Arguments, progress: "Progress", train: "Dataset", planned_for: Callable[[int], "Dataset | None"]
) -> None:
    """Reject a length of the run that would change which samples were trained on before `progress`.

    megatron-core shuffles all epochs together, so with more epochs the first has another order too. `planned_for(n)`
    builds the training data of a run of n samples. Every rank calls this.

    Raises:
        UsageError: the samples differ.
    """
    planned, consumed = progress.planned_train_samples, progress.consumed_train_samples
    if args.override_data_order or not (planned and consumed) or planned == train_samples(args):
        return
    before = planned_for(planned)
    assert before is not None  # it had samples
    there = [at for at in _probes(before, consumed) if at < len(train)]  # type: ignore[arg-type]
    if all((before[at]["tokens"] == train[at]["tokens"]).all() for at in there):
        return
    name, length = "train_iters", planned // args.global_batch_size
    if args.train_samples:
        name, length = "train_samples", planned
    why = f"the checkpoint in --load {args.load} is from a run of {length}, and other epochs reshuffle the data"
    refuse(args, name, f"{why}; give {FLAGS[name].as_flag(length)}, or --override-data-order")


def _probes(data: "Dataset", consumed: int) -> set[int]:
    """Some of the first `consumed` samples, of each data set of a blend."""
    from megatron.core.datasets.blended_dataset import BlendedDataset  # which a dry run does not wait for

    own: list[Sequence[int]] = [range(consumed)]
    if isinstance(data, BlendedDataset):
        parts = data.dataset_index[:consumed]
        own = [(parts == number).nonzero()[0].tolist() for number in range(len(data.datasets))]
    parts = [part / (_PROBES - 1) for part in range(_PROBES)]
    return {places[round(part * (len(places) - 1))] for places in own if places for part in parts}


def _refuse(args: Arguments, flag: Flag, now: object, saved: object) -> NoReturn:
    checkpoint = f"the checkpoint in --load {args.load} was saved"
    if flag.kind is bool:
        here = f"{flag.option}: {_short(flag, now)}, but"
        there, advice = ("without", "leave out") if saved == flag.default else ("with", "give")
        there, advice = f"{there} it", f"{advice} {flag.option}"
    else:
        here = f"{flag.option}: not given, but" if now is None else f"{_written(flag, now)}:"
        there, advice = f"with {_short(flag, saved)}", f"give {_written(flag, saved)}"
        if saved is None:
            there, advice = "without it", f"leave out {flag.option}"
    other = {"data order": "--override-data-order", "model": "--finetune"}.get(flag.decides, "another --load")
    raise UsageError(f"{here} {checkpoint} {there}; {advice}, or {other}")


def _written(flag: Flag, value: object) -> str:
    """A flag with a value, as on a command line."""
    if flag.kind is bool:
        return flag.option if value != flag.default else f"no {flag.option}"
    return f"no {flag.option}" if value is None else f"{flag.option} {_short(flag, value)}"


def _short(flag: Flag, value: object) -> str:
    """A value alone, as on a command line."""
    if flag.kind is bool:
        return "given" if value != flag.default else "not given"
    if isinstance(value, list):
        return (" " if flag.many else ",").join(map(str, value))
    return "not given" if value is None else str(value)
