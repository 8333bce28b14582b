"""transformers' Trainer and TRL's SFTTrainer over context-parallel ranks: the losses of one rank with their own."""

from types import SimpleNamespace

import pytest

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


def test_trainer_equals_one_rank(ranks, model, tmp_path):
    """A model with windows, which accelerate's own context parallelism refuses."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, MistralConfig, MistralForCausalLM

    sizes = AutoConfig.from_pretrained(model).to_dict() | {"model_type": "mistral", "sliding_window": 50}
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**sizes)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    compare(ranks, str(tmp_path))


def test_sft_trainer_on_packed_chats_equals_one_rank(ranks, model, tmp_path):
    pytest.importorskip("trl", reason="needs the package trl")
    chats = tmp_path / "chats.jsonl"
    small_chats.main(model, str(chats))
    compare(ranks, model, "--chats", str(chats))


def evaluated(folder: str, cp_size: int) -> tuple[list[float], str]:
    """The loss of three samples in batches of two, also by a trainer with a step of its own, and what predict says."""
    import torch
    from accelerate import ParallelismConfig
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from examples.huggingface.trainer import on_cpu
    from megatron.context_parallel import UsageError
    from megatron.context_parallel.integration.trainer import ContextParallelTrainer

    class OwnStep(Trainer):
        """As TRL's SFTTrainer."""

        def prediction_step(self, model, inputs, *_, **others):
            with torch.no_grad():
                return self.compute_loss(model, self._prepare_inputs(inputs)), None, None

    few = {"output_dir": f"{folder}/run", "max_steps": 1, "learning_rate": 0.0, "per_device_eval_batch_size": 2}
    settings = few | {"save_strategy": "no", "report_to": []} | on_cpu()
    if cp_size > 1:
        settings |= {"parallelism_config": ParallelismConfig(cp_size=cp_size), "fsdp": True}
    rows = torch.arange(5 * 32).remainder(97).view(5, 32)
    data = [{"input_ids": row, "labels": row.masked_fill(row < 20 * i, -100)} for i, row in enumerate(rows)]
    losses = []
    for base in (Trainer, OwnStep):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        kind = type("Ours", (ContextParallelTrainer, base), {}) if cp_size > 1 else base
        trainer = kind(model=model, args=TrainingArguments(**settings), train_dataset=data, eval_dataset=data[:3])
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    try:
        trainer.predict(data[:2])
    except UsageError as error:
        return losses, str(error)
    return losses, ""


def test_an_evaluation_has_the_loss_of_one_rank(ranks, model):
    ((losses, _),) = ranks(1, evaluated, model, 1)
    for found, refused in ranks(2, evaluated, model, 2):
        assert found == pytest.approx(losses, rel=1e-6)
        assert refused == "predict: a rank has the logits of its own tokens only; call evaluate"


def test_options_that_need_whole_sequences_are_refused():
    from megatron.context_parallel import UsageError
    from megatron.context_parallel.integration.trainer import ContextParallelTrainer

    names = ("cp", "label_smoother", "neftune_noise_alpha", "compute_loss_func", "compute_metrics")
    plain = dict.fromkeys(names)
    for name, message in (
        ("label_smoother", "label_smoothing_factor: it shifts labels that are sharded; give 0"),
        (
            "neftune_noise_alpha",
            "neftune_noise_alpha: its noise depends on the number of tokens of a rank; leave it out",
        ),
        ("compute_loss_func", "compute_loss_func: a rank has the logits of its own tokens only; leave it out"),
        ("compute_metrics", "compute_metrics: a rank has the logits of its own tokens only; leave it out"),
    ):
        trainer = SimpleNamespace(**plain | {name: max})
        with pytest.raises(UsageError, match=message):
            ContextParallelTrainer._prepare_context_parallel_inputs(trainer, None, {})


def test_a_trainer_that_does_not_shard_is_refused():
    from transformers import Trainer

    from megatron.context_parallel import UsageError
    from megatron.context_parallel.integration.trainer import ContextParallelTrainer

    class OwnTrainer(Trainer):
        def training_step(self, *inputs):
            return sum(inputs)

    class Both(ContextParallelTrainer, OwnTrainer):
        pass

    trainer = object.__new__(Both)
    with pytest.raises(UsageError, match="OwnTrainer: does not shard its batches; use Trainer"):
        trainer.training_step(1, 2)
    trainer.cp = "a context group"
    assert trainer.training_step(1, 2) == 3
