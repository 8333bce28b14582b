"""The pretraining loop: iterations, evaluation, checkpoints, and every way a run ends."""

import math
import time
from collections.abc import Sized
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.utils.data import Dataset

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.integration.batch import shard_batch
from megatron.context_parallel.integration.packed import PackedDocuments
from megatron.context_parallel.kernels.to_device import to_device
from megatron.context_parallel.patches.megatron_activation_offloading import offloading_paused
from megatron.context_parallel.runtime.comm.first_rank import on_first_rank
from megatron.context_parallel.runtime.comm.flight_recorder import recorder
from megatron.context_parallel.tokens.documents import Documents

from .arguments.auto import choose_strategy
from .checkpoint.resume import check_shuffle, same_data
from .checkpoint.save_load import load_checkpoint, say
from .checkpoint.save_lock import save_lock
from .checkpoint.saver import Saver
from .checkpoint.train_state import Progress, TrainState
from .config.flags import Arguments
from .config.samples import batch_size, train_samples
from .config.workload import model_of
from .data.batches import KEYS, Splits, build_data_iterator, build_datasets, sample_documents
from .data.tokenizer import build_tokenizer
from .faults import rerun
from .faults.findings import Findings
from .faults.lifetime import sigterm_came
from .faults.rerun import Batches, StepRejectedError, replayable
from .log import RunLog, check_trackers
from .memory_report import explain_out_of_memory
from .model.build import build_model, build_optimizer
from .model.data_parallel import DataParallel, weights_gathered
from .profiling import Profile
from .setup import distributed_job, seed_dropout

# Each model chunk of an interleaved pipeline reads the same micro batches from its own iterator.
ChunkBatches = list[Batches]


class Step(NamedTuple):
    """The result of one iteration, the same on every rank.

    Attributes:
        loss: the mean over the unmasked tokens of the global batch; None if all are masked.
        grad_norm: None if fp16 loss scaling skipped the update.
        flops: the floating-point operations of all ranks.
        leave: whether the run ends here.
        warnings: lines about the hardware.
    """

    loss: float | None
    grad_norm: float | None
    flops: float
    leave: bool
    warnings: list[str]


def pretrain(args: Arguments) -> None:
    """Train as `args` says, from the newest checkpoint of `--load` if there is one, to the end or an exit condition.

    Raises:
        UsageError: data, a checkpoint or a value in `args` is missing or invalid; every rank raises the same.
    """
    check_trackers(args)
    started = time.monotonic()
    progress = Progress()
    with distributed_job(args, progress), save_lock(args):
        if args.skip_train:
            args = replace(args, no_load_optim=True, no_load_rng=True)
        tokenizer = build_tokenizer(args)
        samples = samples_needed(args)
        datasets = build_datasets(args, tokenizer, samples)
        if not args.cp_layers:
            args = choose_strategy(args, sample_documents(args, next(filter(None, datasets), None)))
        with explain_out_of_memory(args):
            state = build_state(args, progress)
            if datasets[0]:
                progress.train_data = on_first_rank(lambda: same_data(args, progress))
                check_shuffle(args, progress, datasets[0], lambda n: build_datasets(args, tokenizer, (n, 0, 0))[0])
            progress.planned_train_samples = samples[0]
            _train_and_evaluate(args, state, datasets, started)


def _train_and_evaluate(args: Arguments, state: TrainState, datasets: Splits, started: float) -> None:
    """Train and then test, or with `--skip-train` only evaluate. Says so if all of it is done already."""
    progress = state.progress
    log = RunLog(args, progress)
    train = _batches(args, state, datasets[0], progress.consumed_train_samples)
    valid = _batches(args, state, datasets[1], first_valid_sample(args, progress, datasets[1]))
    test = _batches(args, state, datasets[2], 0)
    if args.skip_train:
        for split, batches in (("validation", valid), ("test", test)):
            if batches:
                log.evaluation_done(progress.iteration, split, evaluate(args, state, batches))
    else:
        assert train is not None  # only --skip-train has none
        done = progress.iteration >= args.train_iters
        if done and (test is None or on_first_rank(lambda: log.is_tested(progress.iteration))):
            log.say(f"nothing to do: all iterations of --train-iters {args.train_iters} are done")
        elif (done or train_loop(args, state, log, train, valid, started)) and test:
            log.evaluation_done(progress.iteration, "test", evaluate(args, state, test))
    log.close()


def build_state(args: Arguments, progress: Progress) -> TrainState:
    """Model, optimizer, schedule and `progress`, restored from `--load` where it holds a checkpoint."""
    model = build_model(args)
    seed_dropout(args.seed)
    findings = Findings(args, model, rerun.start_machine(args))
    state = TrainState(model, *build_optimizer(args, model), progress, findings)
    if not args.load:
        return state
    if load_checkpoint(args, state):
        say(f"loaded {args.load}, resuming after iteration {state.progress.iteration}")
    elif args.exit_on_missing_checkpoint:
        raise UsageError(
            f"--load {args.load}: has no checkpoint; leave out --exit-on-missing-checkpoint to start from scratch"
        )
    else:
        say(f"no checkpoint in {args.load}, starting from scratch")
    return state


def samples_needed(args: Arguments) -> tuple[int, int, int]:
    """Samples of the whole run for training, validation and test."""
    per_evaluation = args.eval_iters * args.global_batch_size
    if args.skip_train:
        return 0, per_evaluation, per_evaluation
    return train_samples(args), (args.train_iters // args.eval_interval + 1) * per_evaluation, per_evaluation


def first_valid_sample(args: Arguments, progress: Progress, dataset: Dataset | None) -> int:
    """Where the evaluations go on in the validation samples.

    A run that resumes with fewer or smaller evaluations may have fewer samples than were consumed: it takes the last.
    """
    if dataset is None or args.skip_train:
        return 0
    assert isinstance(dataset, Sized)
    evaluations = args.train_iters // args.eval_interval - progress.iteration // args.eval_interval
    left = max(0, evaluations) * args.eval_iters * args.global_batch_size
    return min(progress.consumed_valid_samples, len(dataset) - left)


def _batches(args: Arguments, state: TrainState, dataset: Dataset | None, consumed: int) -> ChunkBatches | None:
    if dataset is None:
        return None
    rank = parallel_state.get_data_parallel_rank()
    note = state.findings.note_data
    return [build_data_iterator(dataset, args, consumed, rank, args.data_parallel_size, note) for _ in state.model]


# ------------------------------------------------------------------------------------------------- the loop


def train_loop(
    args: Arguments, state: TrainState, log: RunLog, train: ChunkBatches, valid: ChunkBatches | None, started: float
) -> bool:
    """Train until `--train-iters` or an exit condition. Returns whether no exit condition ended it.

    `started` is the `time.monotonic()` from which `--exit-duration-in-mins` counts. With `--save` the last iteration
    done is always saved.
    """
    progress = state.progress
    saver = Saver(args, state, log.say)
    profile = Profile(args)
    leave = False
    train = [replayable(args, batches) for batches in train]
    while progress.iteration < args.train_iters and not leave:
        profile.at(progress.iteration)
        before = time.perf_counter()
        try:
            step = train_step(args, state, train, started)
        except (FloatingPointError, UsageError):  # raised on every rank, and after this checkpoint
            saver.finish()
            raise
        except StepRejectedError as rejected:
            saver.finish()
            log.say(str(rejected))
            if args.save and rejected.save:
                saver.start()
                saver.finish()
            raise SystemExit(rejected.status) from None
        for line in step.warnings:
            log.say(line)
        seconds = time.perf_counter() - before
        log.iteration_done(progress, step.loss, _learning_rate(state), step.grad_norm, step.flops, seconds)
        leave = step.leave
        if valid and progress.iteration % args.eval_interval == 0:
            log.evaluation_done(progress.iteration, "validation", evaluate(args, state, valid))
            progress.consumed_valid_samples += args.eval_iters * args.global_batch_size
        if args.save and args.save_interval and progress.iteration % args.save_interval == 0:
            saver.start()
        saver.finish_if_written()
    profile.end()
    saver.end()
    return not leave


def train_step(args: Arguments, state: TrainState, train: ChunkBatches, started: float) -> Step:
    """Do one iteration on every rank.

    Raises:
        UsageError: a token is not in the vocabulary.
        FloatingPointError: a loss, a gradient or the gradient norm is not finite.
        StepRejectedError: `--rerun-mode` ends the run before this iteration changes the weights.
    """
    progress, findings = state.progress, state.findings
    sequences = batch_size(args, progress.consumed_train_samples)
    recorder.enter("forward", progress.iteration + 1)
    for _ in rerun.passes(findings, train):
        for chunk in state.model:
            chunk.zero_grad_buffer()
        state.optimizer.zero_grad()
        data = run_micro_batches(args, state.model, train, sequences, forward_only=False)
        findings.look(data)
    recorder.enter("optimizer")
    warnings = rerun.settle(findings, progress.iteration + 1)
    vote = _should_exit(args, progress.iteration + 1, started)
    loss, flops, votes, found = _mean_loss(data, findings, vote)
    if found:
        warnings = findings.settle(progress.iteration + 1) + warnings
    progress.iteration += 1
    progress.consumed_train_samples += sequences
    updated, grad_norm, _ = state.optimizer.step()
    if updated:
        if args.check_for_nan_in_loss_and_grad and not math.isfinite(grad_norm):
            raise FloatingPointError(f"iteration {progress.iteration}: the gradient norm of all ranks is {grad_norm}")
        state.scheduler.step(increment=sequences)
    return Step(loss, grad_norm if updated else None, flops, votes > 0, warnings)


def run_micro_batches(
    args: Arguments, model: list[DataParallel], batches: ChunkBatches, sequences: int, *, forward_only: bool
) -> list[Tensor]:
    """Run a batch of `sequences` through the pipeline schedule.

    Returns, on the last stage, float64 [loss sum, tokens, floating-point operations] of each micro batch. The first two
    are those of this context rank. The operations are a context rank's share of the micro batch's.
    """
    return get_forward_backward_func()(
        forward_step_func=partial(_forward_step, args),
        data_iterator=batches if len(model) > 1 else batches[0],
        model=model,
        num_microbatches=sequences // (args.micro_batch_size * args.data_parallel_size),
        seq_length=args.micro_batch_size * args.seq_length if args.cp_place_documents else args.seq_length,
        micro_batch_size=1 if args.cp_place_documents else args.micro_batch_size,
        forward_only=forward_only,
    )


def _forward_step(args: Arguments, batches: Batches, model: DataParallel):
    batch: dict[str, Any] = dict.fromkeys(("tokens", "position_ids", "labels", "loss_mask"))
    packed = documents = None
    at_an_end = get_attr_wrapped_model(model, "pre_process") or get_attr_wrapped_model(model, "post_process")
    if at_an_end or args.reset_attention_mask:
        recorder.enter("data" if torch.is_grad_enabled() else "evaluation data")
        whole = next(batches)
        documents = whole.get("documents")
        if documents is not None:
            packed = PackedDocuments(documents=documents)
        cp = get_attr_wrapped_model(model, "context_parallel")
        local = shard_batch({name: whole[name] for name in KEYS}, cp, documents)
        device = torch.device(torch.cuda.current_device())
        batch = {name: to_device(tensor, device) for name, tensor in local.items()}
    recorder.enter("forward" if torch.is_grad_enabled() else "evaluation")
    losses = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
    out = model(batch["tokens"], batch["position_ids"], None, **losses, packed_seq_params=packed)
    if out.requires_grad:
        out.register_hook(lambda gradient: recorder.enter("backward"))
    return out, partial(_loss, args, documents, batch["loss_mask"])


def _loss(
    args: Arguments, documents: Documents | None, loss_mask: Tensor, total: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # megatron-core divides the summed gradients by the token count of all ranks and micro batches.
    tokens = loss_mask.sum()
    lengths = [args.seq_length] * args.micro_batch_size if documents is None else documents.lengths
    flops = model_of(args).flops(args.micro_batch_size * args.seq_length, lengths) / args.context_parallel_size
    sums = torch.stack([total.detach(), tokens]).double()
    return total, tokens.int(), torch.cat((sums, sums.new_full((1,), flops)))


def _mean_loss(data: list[Tensor], findings: Findings, vote: bool = False) -> tuple[float | None, float, int, int]:
    """The mean loss over the unmasked tokens, None without any; the operations, votes and findings of all ranks.

    They take one reduction over the world.
    """
    device = torch.device(torch.cuda.current_device())
    sums = to_device(torch.tensor([0, 0, 0, vote, len(findings.found)], dtype=torch.float64), device)
    if data and parallel_state.get_tensor_model_parallel_rank() == 0:  # only the last stage has losses
        sums[:3] = torch.stack(data).sum(0)
    dist.all_reduce(sums)
    total, tokens, flops, votes, found = sums.tolist()
    return total / tokens if tokens else None, flops, int(votes), int(found)


def _should_exit(args: Arguments, iteration: int, started: float) -> bool:
    minutes = (time.monotonic() - started) / 60
    return (
        sigterm_came()
        or bool(args.exit_interval and iteration % args.exit_interval == 0 and iteration < args.train_iters)
        or bool(args.exit_duration_in_mins and minutes > args.exit_duration_in_mins)
    )


@torch.no_grad()
def evaluate(args: Arguments, state: TrainState, batches: ChunkBatches) -> float | None:
    """Mean loss per unmasked token over `--eval-iters` global batches; None if all tokens are masked.

    Raises:
        UsageError: a token is not in the vocabulary.
    """
    recorder.enter("evaluation")
    with weights_gathered(args, state.model), offloading_paused(state.model[0].config):
        for chunk in state.model:
            chunk.eval()
        data = []
        for _ in range(args.eval_iters):
            data += run_micro_batches(args, state.model, batches, args.global_batch_size, forward_only=True)
        for chunk in state.model:
            chunk.train()
    loss, _, _, found = _mean_loss(data, state.findings)
    if found:
        state.findings.settle(state.progress.iteration)
    return loss


def _learning_rate(state: TrainState) -> float:
    return get_canonical_lr_for_logging(state.optimizer.param_groups)
