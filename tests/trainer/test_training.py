"""The loss of a training run does not depend on its parallel layout."""

import functools
import json
import os
import signal
import time
from dataclasses import replace

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron.context_parallel.cluster.step.model_shape import ModelShape
from megatron.context_parallel.kernels.aten import AtenFlash
from megatron.context_parallel.trainer import log, training
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.checkpoint.train_state import Progress
from megatron.context_parallel.trainer.faults import lifetime
from tests.support import flags_case, training_case
from tests.support.case_args import CaseArgs
from tests.support.training_case import BATCH
from tests.support.training_spreads import CP, KEPT, PP, RECOMPUTED, SPREADS, TP, check_spread, train_from
from tests.support.training_spreads import reference as reference  # a fixture

PACKED = {"reset_attention_mask": True, "eod_token": 3}
PLACED = PACKED | {"cp_place_documents": True}
FSDP2 = {"use_torch_fsdp2": True, "use_distributed_optimizer": False}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.5}
MASKED_SPREADS = [
    ("llama", 4, PLACED | {CP: 4, "cp_strategy": "lightseq", "cp_layout": "contiguous"}),
    ("gpt3", 4, PLACED | {CP: 2, PP: 2, "cp_strategy": "mesh"}),
    ("llama", 4, PLACED | {CP: 2, TP: 2, "sequence_parallel": True, "window_size": (9, 0)}),
    ("llama", 4, PLACED | RECOMPUTED | KEPT | {CP: 4, "cp_strategy": "usp", "cp_options": {"head_parallel_size": 2}}),
    (
        "llama",
        4,
        PLACED | {CP: 2, "cp_strategy": "direct", "use_torch_fsdp2": True, "use_distributed_optimizer": False},
    ),
    ("llama", 2, PACKED | {CP: 2, "recompute_granularity": "selective"}),
    ("llama", 4, {CP: 4, "cp_layout": "contiguous", "window_size": (5, 0)}),
]
CASES = [(family, name) for name, (families, *_) in SPREADS.items() for family in families.split()]


@pytest.mark.parametrize(("family", "spread"), CASES)
def test_every_step_has_the_loss_of_one_rank(ranks, reference, family, spread):
    """`tests/campaigns/training.py` trains each family in every layout."""
    check_spread(ranks, reference, family, *SPREADS[spread][1:])


@pytest.fixture(scope="module")
def masked_reference(ranks, reference):
    """How a family trains on one rank with these documents and windows."""

    @functools.cache
    def run(family: str, **masks: object):
        start, unmasked = reference(family)
        (one,) = ranks(1, train_from, start, family, masks)
        assert one.losses != pytest.approx(unmasked.losses, rel=1e-3)
        assert max(one.flops) < min(unmasked.flops)
        return start, one

    return run


@pytest.mark.parametrize(("family", "world", "changes"), MASKED_SPREADS)
def test_packed_documents_and_windows_train_as_on_one_rank(ranks, masked_reference, family, world, changes):
    alone = {name: changes[name] for name in ("reset_attention_mask", "eod_token", "window_size") if name in changes}
    start, one = masked_reference(family, **alone)
    for run in ranks(world, train_from, start, family, changes):
        assert run.losses == pytest.approx(one.losses, rel=1e-6)
        assert run.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
        assert run.flops == pytest.approx(one.flops)


def test_data_parallel_ranks_that_share_documents_train_as_on_one_rank(ranks, tmp_path):
    """`--dynamic-context-parallel` from the command line; `tests/campaigns/training.py` has more spreads."""
    data = flags_case.prepare(tmp_path)
    ranks(1, flags_case.save_start, data)
    (one,) = ranks(1, flags_case.train, data)
    for run in ranks(4, flags_case.train, data, flags_case.SPREADS["cp2 dp2"]):
        assert run.losses == pytest.approx(one.losses, rel=1e-6)
        assert run.grad_norms == pytest.approx(one.grad_norms, rel=1e-5)
        assert run.flops == pytest.approx(one.flops)
    assert one.losses[-1] < 0.95 * one.losses[0]


def count_kernel_calls(start: str, changes: dict) -> tuple[int, int]:
    """Calls of the block kernel, forward and backward, in two steps of two layers and two micro batches."""
    calls = {"forward": 0, "backward": 0}
    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            original = getattr(AtenFlash, name)

            def counted(*args, name=name, original=original, **how):
                calls[name] += 1
                return original(*args, **how)

            patch.setattr(AtenFlash, name, counted)
        training_case.train("llama", load=start, finetune=True, train_iters=2, **changes)
    return calls["forward"], calls["backward"]


def test_attention_that_is_kept_is_not_computed_again(ranks, reference):
    start, _ = reference("llama")
    plain, again, kept = (
        ranks(2, count_kernel_calls, start, changes) for changes in ({CP: 2}, RECOMPUTED, RECOMPUTED | KEPT)
    )
    for (forward, backward), twice, once in zip(plain, again, kept, strict=True):
        assert (twice, once) == ((2 * forward, backward), (forward, backward))


@pytest.mark.parametrize("family", ["llama", "gpt3"])
def test_training_learns(ranks, reference, family):
    start, _ = reference(family)
    losses = ranks(1, train_from, start, family, {"train_iters": 20})[0].losses
    assert sum(losses[-5:]) < 0.97 * sum(losses[:5])


def test_batches_have_uneven_masks():
    # Otherwise a loss averaged rank by rank would pass the tests above.
    mask = training_case.sample(2)["loss_mask"]
    assert mask[:8].sum() == 0 < mask[8:].sum() < 24


class Logging(training_case.Recorder):
    """Keeps the numbers of a run, and its log in the folder `save`."""

    def __init__(self, save: str) -> None:
        super().__init__()
        args = training_case.case_args("llama", save=save, peak_tflops=1.0, wandb_project=None, log_interval=2)
        self.log, self.lines = log.RunLog(args, Progress()), []
        self.log.say = self.lines.append

    def iteration_done(self, progress, *numbers) -> None:
        super().iteration_done(progress, *numbers)
        self.log.iteration_done(progress, *numbers)

    def evaluation_done(self, *numbers) -> None:
        super().evaluation_done(*numbers)
        self.log.evaluation_done(*numbers)


def train_masked(folder: str, changes: dict) -> tuple[list, list, list, list[str]]:
    """Two steps and an evaluation of which the first step and the evaluation are of masked tokens alone."""
    given = training_case.batches

    def masked(args, consumed):
        first = BATCH // args.data_parallel_size // args.micro_batch_size
        for number, batch in enumerate(given(args, consumed)):
            batch["loss_mask"] *= consumed < 1000 and number >= first
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_case, "batches", masked)
        patch.setattr(training_case, "Recorder", functools.partial(Logging, folder))
        run = training_case.train("llama", train_iters=2, eval_iters=1, eval_interval=2, **changes)
    return run.losses, run.grad_norms, run.evaluations, run.lines


@pytest.mark.parametrize("changes", [{CP: 2}, EXPERTS, EXPERTS | {PP: 2}, EXPERTS | FSDP2])
def test_a_batch_without_a_learned_token_has_no_loss(ranks, tmp_path, changes):
    """Nor gradients: those of the experts' auxiliary loss would not be divided."""
    (losses, norms, evaluations, lines), other = ranks(2, train_masked, str(tmp_path), changes)
    assert losses[0] is None and losses[1] > 1
    assert norms[0] == 0 < norms[1]
    assert evaluations == [None]
    assert other[:3] == (losses, norms, evaluations)
    assert lines[0] == f"warning: iteration 1: {log.NO_LOSS}; momentum and weight decay alone change the weights"
    assert f" | loss {losses[1]:.4f} (iterations without: 1) | " in lines[1]
    assert lines[-1] == f"validation at iteration 2 | no loss: {log.NO_LOSS}"
    record, validation = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (record["lm_loss"], record["iterations_without_loss"]) == (losses[1], 1)
    assert validation == {"iteration": 2, "valid_loss": None}


def first_random_numbers(layout: dict) -> tuple[float, float]:
    """The first of dropout where tensor-parallel ranks hold the same hidden states, and where each has its own."""
    args = training_case.case_args("gpt3", **layout)
    with training_case.groups(args):
        training_case.build(args)
        shared = torch.rand(()).item()
        with get_cuda_rng_tracker().fork():
            return shared, torch.rand(()).item()


@pytest.mark.parametrize("layout", [{CP: 2}, {CP: 2, TP: 2}, {CP: 2, PP: 2}], ids=["dp2", "tp2", "pp2"])
def test_ranks_with_other_tokens_or_layers_draw_other_dropout(ranks, layout):
    shared, own = zip(*ranks(4, first_random_numbers, layout), strict=True)
    assert len({*shared}) == (2 if TP in layout else 4)
    assert shared[0] != shared[2]
    assert len({*own}) == 4


def run_into_nan() -> list[float]:
    recorder = training_case.Recorder()
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(FloatingPointError, match="iteration 1: loss of micro batch 1 of 2 is nan on rank 0"),
    ):
        patch.setattr(training_case, "Recorder", lambda: recorder)
        training_case.train("llama", init_method_std=float("inf"))
    return recorder.losses


def test_a_loss_that_is_not_finite_stops_the_run(ranks):
    assert ranks(1, run_into_nan) == [[]]


def run_until(**exit_condition) -> int:
    return len(training_case.train("llama", **exit_condition).losses)


def run_until_out_of_time() -> int:
    return run_until(exit_duration_in_mins=1e-9)


def run_until_interval() -> int:
    return run_until(exit_interval=3)


def run_until_sigterm() -> int:
    """Rank 0 alone is told to stop; both do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifetime, "_sigterm", [])
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        handler = signal.getsignal(signal.SIGTERM)
        lifetime.hold_back_sigterm()
        if torch.distributed.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        done = run_until()
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        signal.signal(signal.SIGTERM, handler)
    return done


@pytest.mark.parametrize(
    ("run", "iterations"), [(run_until_out_of_time, 1), (run_until_interval, 3), (run_until_sigterm, 1)]
)
def test_exit_conditions(ranks, run, iterations):
    assert ranks(2, run) == [iterations, iterations]


def test_a_run_whose_last_iteration_is_a_multiple_of_the_exit_interval_is_tested_too():
    asked = {"exit_interval": 5, "exit_duration_in_mins": None, "train_iters": 15}
    left = [i for i in range(1, 16) if training._should_exit(CaseArgs(**asked), i, time.monotonic())]
    assert left == [5, 10]


def test_flops():
    # One layer, h=4, two heads of 2 with one shared key/value head, 8 tokens, SwiGLU of 6, vocabulary 10.
    model = ModelShape(
        num_layers=1,
        hidden_size=4,
        ffn_hidden_size=6,
        num_attention_heads=2,
        num_query_groups=1,
        kv_channels=2,
        padded_vocab_size=10,
    )
    projections = 8 * (4 * 4 + 2 * 4 * 2 + 4 * 4)
    attention = 2 * 2 * (8 * 8 / 2) * 2  # QK^T and PV: 2 heads of width 2, half of 8 x 8 pairs
    assert model.flops_per_sequence(8) == 3 * 2 * (projections + attention + 8 * 3 * 4 * 6 + 8 * 4 * 10)
    attention = 2 * 2 * (4 * 4 / 2 + 4 * 4) * 2  # half of the first 4 x 4 pairs, then 4 keys for each token
    windowed = replace(model, window_size=4)
    assert windowed.flops_per_sequence(8) == 3 * 2 * (projections + attention + 8 * 3 * 4 * 6 + 8 * 4 * 10)
    windowed = replace(model, window_size=100)
    assert windowed.flops_per_sequence(8) == 3 * 2 * (projections + 2 * 2 * 32 * 2 + 8 * 3 * 4 * 6 + 8 * 4 * 10)
    attention = 2 * 2 * (2 * 2 / 2 + 4 * 4 / 2) * 2  # documents of 2 and 4 tokens, and 2 of padding
    assert model.flops(8, [2, 4]) == 3 * 2 * (projections + attention + 8 * 3 * 4 * 6 + 8 * 4 * 10)


def test_the_first_line_says_what_a_sequence_is():
    flags = "--preset tiny-llama --mock-data --micro-batch-size 1 --global-batch-size 8 --lr 1"
    args = parse_args(f"{flags} --train-iters 5".split())
    assert "5 iterations of 8 sequences of 128 tokens; " in log._explain(args, None)
    assert log._explain(args, None).endswith("FLOP each")
    args = parse_args(f"{flags} --train-samples 40 --rampup-batch-size 4 4 12 --reset-attention-mask".split())
    assert " of 4 to 8 sequences of 128 tokens; " in log._explain(args, None)
    assert log._explain(args, None).endswith("FLOP each, if each were one document")


def test_metrics_of_iterations_to_be_done_again_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iteration": 3}\n{"iterat')
    with log._resume_metrics(path, 3) as file:
        file.write('{"iteration": 3, "again": 1}\n')
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 2}\n{"iteration": 3, "again": 1}\n'


def evaluate_earlier(folder: str) -> None:
    """Evaluates the checkpoint of iteration 1 in the folder of a run that went on to iteration 3."""
    args = training_case.case_args("llama", save=folder, skip_train=True, peak_tflops=1.0, wandb_project=None)
    run = log.RunLog(args, Progress(iteration=1))
    run.evaluation_done(1, "test", 4.5)
    run.close()


def test_an_evaluation_alone_keeps_the_metrics_of_later_iterations(ranks, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 3}\n')
    ranks(1, evaluate_earlier, str(tmp_path))
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 3}\n{"iteration": 1, "test_loss": 4.5}\n'
