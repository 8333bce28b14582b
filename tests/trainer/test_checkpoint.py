"""A stopped run resumes as if it had not been stopped, and an interrupted save damages nothing."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer.checkpoint import publish, train_state
from megatron.context_parallel.trainer.checkpoint import save_load as checkpoint
from megatron.context_parallel.trainer.checkpoint.store import iteration_directory, latest_iteration
from tests.support import training_case

TP, PP, CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
STOP, END = 1, 3


def train_and_stop(directory: str, family: str, layout: dict) -> list[float]:
    """Losses of an uninterrupted run from STOP on; another is stopped there and saved."""
    whole = training_case.train(family, train_iters=END, **layout)
    training_case.train(family, train_iters=END, exit_interval=STOP, save=directory, **layout)
    return whole.losses[STOP:]


def resume(directory: str, family: str, layout: dict) -> list[float]:
    return training_case.train(family, train_iters=END, load=directory, **layout).losses


@pytest.mark.parametrize(
    ("family", "world", "layout"),
    [
        ("llama", 4, {CP: 2, TP: 2, "decoupled_lr": 3e-3, "decoupled_min_lr": 1e-4}),
        ("gpt3", 4, {CP: 2, PP: 2}),  # the tied embedding has a bucket of its own, behind a padded one
        ("llama", 2, {CP: 2, "use_distributed_optimizer": False}),
        ("gpt3", 1, {"hidden_dropout": 0.1}),
    ],
)
def test_resume_is_bit_for_bit_on_the_same_layout(ranks, tmp_path, family, world, layout):
    whole = ranks(world, train_and_stop, str(tmp_path), family, layout)
    assert ranks(world, resume, str(tmp_path), family, layout) == whole
    assert [len(losses) for losses in whole] == [END - STOP] * world


def test_generators_of_another_kind_of_device_are_not_restored(ranks):
    assert ranks(1, restore_generators_of_a_gpu) == [(False, True)]


def restore_generators_of_a_gpu() -> tuple[bool, bool]:
    """Whether the states of a run on a GPU were restored, and whether the generators were left as they are."""
    states = train_state._generators()
    of_a_gpu = states | {"device": torch.zeros(16, dtype=torch.uint8)}
    torch.rand(1)
    before = torch.get_rng_state()
    return train_state.set_generators(of_a_gpu), torch.equal(torch.get_rng_state(), before)


@pytest.fixture(scope="module")
def stopped(ranks, tmp_path_factory) -> tuple[str, list[list[float]]]:
    """The checkpoint of a run on four context ranks, and its later losses there."""
    directory = str(tmp_path_factory.mktemp("stopped"))
    return directory, ranks(4, train_and_stop, directory, "llama", {CP: 4})


def test_resume_is_bit_for_bit_on_four_context_ranks(ranks, stopped):
    directory, whole = stopped
    assert ranks(4, resume, directory, "llama", {CP: 4}) == whole


@pytest.mark.parametrize(
    "then",
    [{CP: 2, TP: 2}, {CP: 2, PP: 2}, {CP: 4, "cp_layout": "cyclic"}],
    ids=["tp2", "pp2", "cyclic"],
)
def test_resume_in_another_layout(ranks, stopped, then):
    directory, whole = stopped
    for resumed in ranks(4, resume, directory, "llama", then):
        assert resumed == pytest.approx(whole[0], rel=1e-5)


def interrupt(directory: str, how: str) -> list[float]:
    """Train to STOP, break the next save, resume: losses after STOP."""
    training_case.train("llama", train_iters=STOP, save=directory)
    part, name = {
        "writing": (checkpoint.dist_checkpointing, "save"),
        "flushing": (publish, "_flush"),
        "publishing": (Path, "replace"),
    }[how]
    with pytest.MonkeyPatch.context() as patch, pytest.raises((OSError, UsageError), match="disk full"):
        patch.setattr(part, name, _disk_full)
        training_case.train("llama", train_iters=STOP + 1, save=directory, load=directory)
    assert latest_iteration(directory) == STOP
    return training_case.train("llama", train_iters=END, save=directory, load=directory).losses


def _disk_full(*args, **kwargs):
    raise OSError("disk full")


@pytest.mark.parametrize("how", ["writing", "flushing", "publishing"])
def test_interrupted_save_leaves_the_one_before(ranks, tmp_path, how):
    whole = ranks(1, partial(training_case.train, train_iters=END), "llama")[0].losses
    assert ranks(1, interrupt, str(tmp_path), how)[0] == whole[STOP:END]
    assert latest_iteration(tmp_path) == END
    assert not list(tmp_path.glob("iter_*.incomplete"))


def save_at(directory: str, iteration: int) -> None:
    training_case.train("llama", train_iters=iteration, save=directory)


def test_contents(ranks, tmp_path):
    ranks(1, save_at, str(tmp_path), 2)
    saved = json.loads((iteration_directory(tmp_path, 2) / "args.json").read_text())
    assert saved["hidden_size"] == 32
    assert saved["params_dtype"] == "torch.float32"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert {p.name for p in tmp_path.iterdir()} == {"iter_0000002", "latest_checkpointed_iteration.txt"}


def test_saving_an_iteration_again_replaces_it(ranks, tmp_path):
    ranks(1, save_at, str(tmp_path), 2)
    (iteration_directory(tmp_path, 2) / "stale").touch()
    ranks(1, save_at, str(tmp_path), 2)
    assert not (iteration_directory(tmp_path, 2) / "stale").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"iter_0000002", "latest_checkpointed_iteration.txt"}


def start_from(directory: str, **changes) -> tuple[int, float]:
    run = training_case.train("llama", train_iters=1, load=directory, **changes)
    return len(run.losses), run.losses[0] if run.losses else 0.0


def finetune(directory: str) -> list[float]:
    first = training_case.train("llama", train_iters=3)
    training_case.train("llama", train_iters=2, save=directory)
    return [
        first.losses[2],
        training_case.train("llama", train_iters=3, load=directory, no_load_optim=True, no_load_rng=True).losses[0],
        training_case.train("llama", train_iters=1, load=directory, finetune=True).losses[0],
        first.losses[0],
    ]


def test_finetune_keeps_the_weights_alone(ranks, tmp_path):
    third, without_optimizer, finetuned, fresh = ranks(1, finetune, str(tmp_path))[0]
    assert without_optimizer == third  # same weights, same batch; the optimizer matters from the next step on
    assert finetuned not in (fresh, third)  # trained weights on the first batch


def missing(directory: str, **changes) -> str:
    with pytest.raises(UsageError) as caught:
        training_case.train("llama", load=directory, **changes)
    return str(caught.value)


def missing_and_required(directory: str) -> str:
    return missing(directory, exit_on_missing_checkpoint=True)


def test_missing_checkpoint(ranks, tmp_path):
    empty = str(tmp_path)
    assert ranks(1, start_from, empty)[0][0] == 1
    assert "--exit-on-missing-checkpoint" in ranks(1, missing_and_required, empty)[0]


def test_tracker_that_is_wrong(ranks, tmp_path):
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("garbage")
    assert "'garbage'" in ranks(1, missing, str(tmp_path))[0]
    tracker.write_text("12")
    assert "iter_0000012" in ranks(1, missing, str(tmp_path))[0]
