"""transformers' Trainer and TRL's SFTTrainer over context-parallel ranks: the losses of one rank with their own."""

from types import SimpleNamespace

import pytest
import torch

from examples.huggingface import small_chats, small_llama

for package in ("transformers", "accelerate"):
    pytest.importorskip(package, reason=f"needs the package {package}")
STEPS = 4


def trained(model: str, *flags: str) -> list[float]:
    from examples.huggingface import trainer

    return trainer.main(
        [model, *flags, "--output", f"{model}/run", "--steps", str(STEPS), "--seq-length", "128", "--lr", "0.003"]
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    small_llama.main(str(folder))
    return str(folder)


def compare(ranks, *flags: str) -> None:
    """On 4 ranks, 2 of them for each sequence."""
    (expected,) = ranks(1, trained, *flags)
    assert len(expected) == STEPS and expected[-1] < expected[0] - 0.1
    for losses in ranks(4, trained, *flags, "--cp-size", "2", "--cp-strategy", "ring:layout=cyclic"):
        assert losses == pytest.approx(expected, rel=1e-6)


def test_trainer_equals_one_rank(ranks, model):
    compare(ranks, model)


def evaluated(folder: str, cp_size: int) -> tuple[float, str]:
    """The loss of three samples in batches of two, and what is said to `predict`."""
    from accelerate import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    from examples.huggingface.trainer import on_cpu
    from megatron.context_parallel import UsageError
    from megatron.context_parallel.integration.trainer import ContextParallelTrainer
    from tests.support.transformers_case import batch, model_of

    settings = {"output_dir": folder, "per_device_eval_batch_size": 2, "max_steps": 1, "save_strategy": "no"}
    settings |= {"report_to": [], **on_cpu()}
    if cp_size > 1:
        settings |= {"parallelism_config": ParallelismConfig(cp_size=cp_size), "fsdp": True}
    tokens, labels = (torch.cat([x, x[:1].flip(1)]) for x in batch().values())
    labels[2, 9:] = -100  # so that no two samples, and no two ranks, have equal losses
    rows = [{"input_ids": ids, "labels": of} for ids, of in zip(tokens, labels, strict=True)]
    kind = ContextParallelTrainer if cp_size > 1 else Trainer
    trainer = kind(model=model_of("llama"), args=TrainingArguments(**settings), train_dataset=rows)
    trainer.train()  # FSDP2 needs an optimizer
    loss = trainer.evaluate(rows)["eval_loss"]
    if cp_size == 1:
        return loss, ""
    with pytest.raises(UsageError) as refused:
        trainer.predict(rows)
    return loss, str(refused.value)


def test_an_evaluation_is_that_of_one_rank(ranks, tmp_path):
    ((expected, _),) = ranks(1, evaluated, str(tmp_path), 1)
    for loss, said in ranks(2, evaluated, str(tmp_path), 2):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert said == "predict: a rank has the logits of its own tokens only; call evaluate, for the loss"


def test_sft_trainer_on_packed_chats_equals_one_rank(ranks, model, tmp_path):
    pytest.importorskip("trl", reason="needs the package trl")
    chats = tmp_path / "chats.jsonl"
    small_chats.main(model, str(chats))
    compare(ranks, model, "--chats", str(chats))


def test_options_that_need_whole_sequences_are_refused():
    from megatron.context_parallel import UsageError
    from megatron.context_parallel.integration.trainer import ContextParallelTrainer

    plain = {"cp": None, "label_smoother": None, "compute_loss_func": None, "compute_metrics": None}
    for name, message in (
        ("label_smoother", "label_smoothing_factor: it shifts labels that are sharded; give 0"),
        ("compute_loss_func", "compute_loss_func: a rank has the logits of its own tokens only; leave it out"),
        ("compute_metrics", "compute_metrics: a rank has the logits of its own tokens only; leave it out"),
    ):
        trainer = SimpleNamespace(**plain | {name: max})
        with pytest.raises(UsageError, match=message):
            ContextParallelTrainer._prepare_context_parallel_inputs(trainer, None, {})
