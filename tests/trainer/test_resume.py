"""Values that a resumed run takes from its checkpoint and its flags; background saves; kills during a save."""

import itertools
import shutil
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core.dist_checkpointing import load_common_state_dict
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.trainer import setup, training
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.checkpoint import publish
from megatron.context_parallel.trainer.checkpoint import save_load as checkpoint
from megatron.context_parallel.trainer.checkpoint import store as checkpoint_store
from megatron.context_parallel.trainer.checkpoint.data_digest import data_digests
from megatron.context_parallel.trainer.checkpoint.manifest import content_faults, read_manifest
from megatron.context_parallel.trainer.checkpoint.resume import check_shuffle, same_data
from megatron.context_parallel.trainer.checkpoint.store import (
    choose_checkpoint,
    iterations,
    latest_iteration,
    loadable_checkpoints,
    quick_fault,
)
from megatron.context_parallel.trainer.checkpoint.train_state import Progress
from megatron.context_parallel.trainer.data.batches import MicroBatches
from tests.support import data_case, training_case

CP = "context_parallel_size"


def resume_with(directory: str, **changes) -> tuple[list[dict], str]:
    """The optimizer's groups after loading with other arguments, and what is printed."""
    args = training_case.case_args("llama", load=directory, **changes)
    with training_case.groups(args), mock.patch("builtins.print") as printed:
        state = training_case.training.build_state(args, Progress())
        groups = []
        for group in state.optimizer.param_groups:
            groups.append({name: value for name, value in group.items() if name != "params"})
        return groups, "\n".join(str(call.args[0]) for call in printed.call_args_list)


def resume_differently(directory: str) -> list:
    constant = {"lr_decay_style": "constant", "lr_warmup_iters": 0}
    training_case.train("llama", train_iters=2, save=directory, **constant)
    other = {"lr": 3e-3, "weight_decay": 0.2, "adam_beta1": 0.9, "adam_beta2": 0.9, "adam_eps": 1e-3, **constant}
    results = [resume_with(directory, train_iters=2, **constant), resume_with(directory, train_iters=3, **other)]
    results.append(resume_with(directory, train_iters=2, global_batch_size=6, **constant))
    for refused in ({"global_batch_size": 2}, {"seed": 1}, {"window_size": (4, 0)}):
        with pytest.raises(UsageError) as caught:
            resume_with(directory, train_iters=2, **constant, **refused)
        results.append(str(caught.value))
    results.append(resume_with(directory, train_iters=2, seed=1, override_data_order=True, **constant))
    results.append(resume_with(directory, train_iters=2, seed=1, window_size=(4, 0), finetune=True, **constant))
    return results


def test_a_resumed_run_follows_its_flags_and_says_so(ranks, tmp_path):
    same, other, batch, small, seed, window, seeded, finetuned = ranks(1, resume_differently, str(tmp_path))[0]
    assert "with changed flags" not in same[1]
    assert "resuming with changed flags: --weight-decay 0.2 (was 0.01), " in other[1]
    assert "--lr 0.003 (was 0.01)" in other[1] and "--train-iters 3 (was 2)" in other[1]
    for group in other[0]:
        assert (group["lr"], group["max_lr"], group["betas"], group["eps"]) == (3e-3, 3e-3, (0.9, 0.9), 1e-3)
        assert group["weight_decay"] == 0.2 * group["wd_mult"]
    assert "resuming with changed flags: --global-batch-size 6 (was 4)" in batch[1]
    assert small.startswith("--global-batch-size 2: 8 samples were consumed") and small.endswith(
        "--global-batch-size 4"
    )
    assert seed.endswith("saved with 1234; give --seed 1234, or --override-data-order")
    assert window.endswith("saved without it; leave out --window-size, or --finetune")
    assert "resuming with changed flags: --seed 1 (was 1234)" in seeded[1]
    assert "finetuning with changed flags: --window-size 4,0 (was not given)" in finetuned[1]


def resume_in_16_bits(start: str, directory: str, sharded: bool) -> list[list]:
    """Gradient norms of whole and resumed fp16 runs; None where the scale of 2^16 overflowed.

    All have the weights of `start`: releases of torch draw different ones in 16 bits.
    """
    half = {"fp16": True, "params_dtype": torch.float16, "use_distributed_optimizer": sharded, "train_iters": 5}
    half["load"] = start
    dynamic = half | {"initial_loss_scale": 2.0**16, "hysteresis": 1, "loss_scale_window": 2}
    runs = [dynamic, dynamic | {"save": directory, "exit_interval": 3}, dynamic | {"load": directory}]
    constant = {"loss_scale": 128.0, "save": directory + "/constant", "exit_interval": 1}
    runs += [half | constant, dynamic | {"load": directory + "/constant", "train_iters": 2}]
    return [training_case.train("llama", **how).grad_norms for how in runs]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_resumed_run_has_the_loss_scale_of_its_checkpoint_if_that_has_one(ranks, tmp_path, sharded):
    start, runs = tmp_path / "start", tmp_path / "runs"
    start.mkdir()
    ranks(1, training_case.save_initial, "llama", str(start), {})
    whole, first, then, _, fresh = ranks(1, resume_in_16_bits, str(start), str(runs), sharded)[0]
    assert whole == first + then and first == [None] * 3 and None not in then
    assert fresh == [None]  # as with the initial scale


def test_a_run_may_resume_with_fewer_and_smaller_evaluations(tmp_path):
    """All that are left have samples: the next ones, or else the last ones."""
    args = data_case.arguments(tmp_path)
    args.__dict__.update(train_iters=20, train_samples=None, eval_interval=2, global_batch_size=2)
    progress = Progress(iteration=10, consumed_valid_samples=5 * 8 * 2)
    for iters, interval, first in ((8, 2, 5 * 8 * 2), (1, 2, (11 - 5) * 2), (8, 5, (5 - 2) * 8 * 2), (9, 2, 5 * 8 * 2)):
        args.__dict__.update(eval_iters=iters, eval_interval=interval)
        samples = range(training.samples_needed(args)[1])
        assert training.first_valid_sample(args, progress, samples) == first
        left = MicroBatches(len(samples), first, 1, 1, 2)
        assert len(left) >= iters * (20 // interval - 10 // interval)
    assert training.first_valid_sample(args, progress, range(10**6)) == 5 * 8 * 2


@pytest.mark.parametrize(
    ("train_iters", "refused"),
    [(20, False), (30, False), (10, False), (200, True)],
    ids=["same", "same epoch", "shorter", "more epochs"],
)
def test_a_length_that_shuffles_anew_is_refused(tmp_path, train_iters, refused):
    args = data_case.arguments(tmp_path, data_path=[data_case.corpus(tmp_path)], split="100,0,0")
    args.__dict__.update(load="run", train_iters=train_iters, global_batch_size=1, train_samples=None)
    args.override_data_order = False
    progress = Progress(iteration=10, consumed_train_samples=10, planned_train_samples=20)
    train = data_case.datasets(args, train_iters, 0, 0)[0]

    def check():
        check_shuffle(args, progress, train, lambda n: data_case.datasets(args, n, 0, 0)[0])

    if not refused:
        return check()
    with pytest.raises(UsageError, match=r"^--train-iters 200: .* give --train-iters 20, or --override-data-order$"):
        check()
    args.override_data_order = True
    check()


def refusals_of_a_blend(folder: Path) -> list[str | None]:
    """Of runs resumed with other lengths; a hundredth of the samples is from a corpus of one sample."""
    prefixes = [data_case.corpus(folder / name, documents) for name, documents in (("large", 400), ("small", 1))]
    found = list[str | None]()
    for train_iters in (330, 420, 200):
        args = data_case.arguments(folder, data_path=["0.99", prefixes[0], "0.01", prefixes[1]], split="100,0,0")
        args.__dict__.update(load="run", train_iters=train_iters, global_batch_size=1, train_samples=None)
        args.override_data_order = False
        progress = Progress(iteration=290, consumed_train_samples=290, planned_train_samples=320)

        def build(samples: int, args=args):
            return data_case.datasets(args, samples, 0, 0)[0]

        try:
            found.append(check_shuffle(args, progress, build(train_iters), build))
        except UsageError as error:
            found.append(str(error))
    return found


def test_a_length_that_shuffles_a_small_part_of_a_blend_anew_is_refused(ranks, tmp_path):
    for name in ("large", "small"):
        (tmp_path / name).mkdir()
    same, longer, shorter = ranks(1, refusals_of_a_blend, tmp_path)[0]
    assert same is None
    for refused in (longer, shorter):
        assert refused.endswith("give --train-iters 320, or --override-data-order")


def without_last_document(folder: Path) -> None:
    data_case.corpus(folder, documents=39)


def with_another_document(folder: Path) -> None:
    """As long as before, so that the index stays."""
    index = (folder / "corpus_text_document.idx").read_bytes()
    tokens = bytearray((folder / "corpus_text_document.bin").read_bytes())
    tokens[-8] += 1
    (folder / "corpus_text_document.bin").write_bytes(tokens)
    assert (folder / "corpus_text_document.idx").read_bytes() == index


def moved(folder: Path) -> None:
    """Files that were copied are the same."""
    for path in folder.glob("corpus_text_document.*"):
        path.write_bytes(path.read_bytes())


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (moved, None),
        (without_last_document, r"\.idx has other documents than the run in --load run was trained on"),
        (with_another_document, r"\.bin has other tokens than the run in --load run was trained on"),
    ],
)
@pytest.mark.parametrize("flag", ["data_path", "train_data_path"])
def test_data_that_changed_under_its_name_is_refused(tmp_path, change, refused, flag):
    args = data_case.arguments(tmp_path, **{flag: ["0.3", data_case.corpus(tmp_path)]})
    args.__dict__.update(load="run", override_data_order=False)
    progress = Progress(consumed_train_samples=10, train_data=same_data(args, Progress()))
    change(tmp_path)
    if refused is None:
        assert same_data(args, progress) == progress.train_data
        return
    with pytest.raises(UsageError, match=f"^--{flag.replace('_', '-')} 0.3 .*{refused}; .* --override-data-order$"):
        same_data(args, progress)
    args.override_data_order = True
    assert same_data(args, progress) != progress.train_data


def test_every_byte_of_small_data_is_compared(tmp_path):
    for size in (1, 4096, 4097, 700_000, 1 << 20):
        prefix = f"{tmp_path}/{size}"
        Path(prefix + ".idx").write_bytes(b"index")
        args = data_case.arguments(tmp_path, data_path=[prefix])
        found = []
        for at in (None, 0, size // 3, size - 1):
            tokens = bytearray(size)
            if at is not None:
                tokens[at] = 1
            Path(prefix + ".bin").write_bytes(tokens)
            found.append(data_digests(args)[prefix][1])
        assert len(set(found)) == (4 if size > 1 else 2)


def test_a_checkpoint_tells_what_it_was_trained_on(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "end_at_signals", lambda *given: None)  # signals end pytest
    prefix = data_case.corpus(tmp_path)
    words = (
        "--preset tiny-llama --seq-length 32 --split 100,0,0 --eval-iters 0 --num-workers 0 --train-iters 1 --lr 1e-3"
    )
    args = parse_args(
        [*words.split(), "--micro-batch-size", "1", "--data-path", prefix, "--save", str(tmp_path / "run")]
    )
    training.pretrain(args)
    saved = load_common_state_dict(str(tmp_path / "run" / "iter_0000001"))["progress"]
    assert saved["train_data"] == data_digests(args) and prefix in saved["train_data"]


# ------------------------------------------------------------------------------------------- in the background


class Slow(training_case.Recorder):
    """Lets the first save be written only after two more iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()
        self.said: list[tuple[int, str]] = []

    def iteration_done(self, *args) -> None:
        super().iteration_done(*args)
        if len(self.losses) == 4:
            self.may_write.set()

    def say(self, line) -> None:
        self.said.append((len(self.losses), line.split(" to ")[0]))


def train_slowly(directory: str) -> tuple[list[float], list[float], list]:
    """Losses of a run with blocking saves and of one with a slow writer in the background; what the latter says."""
    # Plain Adam: its states are the tensors that training changes in place.
    case = {"train_iters": 7, "save_interval": 2, CP: 2, "use_distributed_optimizer": False}
    blocking = training_case.train("llama", save=f"{directory}/blocking", **case)
    recorder, write = Slow(), FileSystemWriterAsync.write_preloaded_data

    def wait_and_write(*args):
        assert recorder.may_write.wait(60)
        write(*args)

    with (
        mock.patch.object(FileSystemWriterAsync, "write_preloaded_data", wait_and_write),
        mock.patch.object(training_case, "Recorder", lambda: recorder),
    ):
        training_case.train("llama", save=f"{directory}/background", async_save=True, **case)
    return blocking.losses, recorder.losses, recorder.said


def test_a_save_in_the_background_is_that_of_its_iteration(ranks, tmp_path):
    for blocking, background, said in ranks(2, train_slowly, str(tmp_path)):
        assert blocking == background
        assert said[0] == (4, "saved iteration 2")  # two iterations later, because the next one is due
        assert [line for _, line in said] == [f"saved iteration {n}" for n in (2, 4, 6, 7)]
    assert iterations(tmp_path / "background") == [2, 4, 6, 7]
    for number in iterations(tmp_path / "background"):
        one, other = (read_manifest(tmp_path / kind / f"iter_{number:07d}") for kind in ("blocking", "background"))
        assert one and other
        shards = [name for name in one if name.endswith(".distcp")]
        assert [one[name] for name in shards] == [other[name] for name in shards]
        assert content_faults(tmp_path / "background" / f"iter_{number:07d}", other, other) == []


def fail_in_the_background(directory: str) -> str:
    training_case.train("llama", train_iters=1, save=directory)

    def fail(transforms, index, bucket, outcome, *others):
        outcome.put((index, OSError(28, "No space left on device", bucket[0])))

    with (
        mock.patch.object(FileSystemWriterAsync, "write_preloaded_data", fail),
        pytest.raises(UsageError) as caught,
    ):
        training_case.train("llama", train_iters=5, save=directory, save_interval=2, async_save=True)
    return str(caught.value)


def test_a_failure_in_the_background_is_raised_on_every_rank(ranks, tmp_path):
    messages = ranks(2, fail_in_the_background, str(tmp_path))
    assert messages[0] == messages[1] and "No space left" in messages[0] and "iter_0000002.incomplete" in messages[0]
    assert latest_iteration(tmp_path) == 1


# ------------------------------------------------------------------------------------------------------- kills


class Killed(BaseException):
    """Nothing in the trainer catches this."""


def kill_everywhere(directory: str) -> int:
    """Save an iteration over itself, killed at the first change on disk, then at the second, and so on; how many."""
    args = training_case.case_args("llama", num_layers=1, save=f"{directory}/whole")
    Path(args.save).mkdir()
    with training_case.groups(args):
        state = training_case.build(args)
        for state.progress.iteration in (1, 2):
            checkpoint.Save(args, state).finish()
        args.keep_last = 1
        for point in itertools.count():
            args.save = args.load = shutil.copytree(f"{directory}/whole", f"{directory}/killed{point}")
            calls = itertools.count()

            def killed_at(function, calls=calls, point=point):
                def change(*given, **named):
                    if next(calls) == point:
                        raise Killed
                    return function(*given, **named)

                return change

            with pytest.MonkeyPatch.context() as patch:
                for part, name in (
                    (Path, "rename"), (Path, "replace"), (Path, "write_text"),
                    (publish, "write_manifest"), (shutil, "rmtree"),
                ):  # fmt: skip
                    patch.setattr(part, name, killed_at(getattr(part, name)))
                try:
                    checkpoint.Save(args, state).finish()
                except Killed:
                    pass
                else:
                    return point
            found = choose_checkpoint(args, *loadable_checkpoints(args), quick_fault, print)
            assert found and checkpoint_store.iteration_of(found) == 2, point
            checkpoint.clear_leftovers(Path(args.save))  # as the next save does first
            assert quick_fault(Path(args.save) / "iter_0000002") is None
            assert not list(Path(args.save).glob("iter_*.*")), point


def test_a_kill_at_any_point_of_a_save_loses_nothing(ranks, tmp_path):
    assert ranks(1, kill_everywhere, str(tmp_path))[0] >= 9
