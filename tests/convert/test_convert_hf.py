"""From HuggingFace to a checkpoint of the trainer and back: bit-equal, in constant memory, and refused inputs."""

import resource
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from megatron.core import parallel_state
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from megatron.context_parallel import UsageError
from megatron.context_parallel.commands import convert_hf
from megatron.context_parallel.convert.to_huggingface import to_folder
from megatron.context_parallel.generation.flags import Source
from megatron.context_parallel.generation.generator import text_tokenizer
from megatron.context_parallel.generation.model_source import model_arguments
from megatron.context_parallel.inference.tokenizer import HuggingFaceTokenizer
from megatron.context_parallel.integration.huggingface.folder import SafetensorsFolder
from megatron.context_parallel.trainer.checkpoint import saved_flags
from megatron.context_parallel.trainer.checkpoint.store import read_saved_args
from tests.support import training_case
from tests.support.convert_case import check_flags_file, convert, finetune
from tests.support.llama_case import CHAT, VOCABULARY, load_llama, save_llama, save_tokenizer

PP, CP = "pipeline_model_parallel_size", "context_parallel_size"


def logits(folder: Path, tensor: int = 1) -> torch.Tensor:
    _, _, model = load_llama(folder, tensor)
    tokens = torch.arange(96)[None] % VOCABULARY
    with torch.no_grad():
        out = model(tokens, torch.arange(96)[None], None, runtime_gather_output=True)[..., :VOCABULARY]
    parallel_state.destroy_model_parallel()
    return out


def there_and_back(folder: Path) -> None:
    convert("to-megatron", folder / "hf", folder / "run")
    convert("to-hf", folder / "run", folder / "back", "--max-shard-size", "20KB")


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen3"])
def test_weights_come_back_bit_for_bit(ranks, tmp_path, family):
    theirs = save_llama(tmp_path / "hf", family, dtype=torch.bfloat16 if family == "mistral" else torch.float32)
    ranks(1, there_and_back, tmp_path)
    first, last = SafetensorsFolder(tmp_path / "hf"), SafetensorsFolder(tmp_path / "back")
    assert len([*(tmp_path / "back").glob("*.safetensors")]) > 1
    assert first.names == last.names
    for name in first.names:
        assert first.read(name).dtype == last.read(name).dtype
        assert torch.equal(first.read(name), last.read(name)), name
    tokens = torch.arange(96)[None] % VOCABULARY
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(again) is type(theirs)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    check_flags_file(tmp_path / "run", window=(10, 0) if family == "mistral" else None)
    (direct,) = ranks(1, logits, tmp_path / "hf")
    (converted,) = ranks(1, logits, tmp_path / "run")
    assert torch.equal(direct, converted)
    if family == "qwen3":
        for split in ranks(2, logits, tmp_path / "run", 2):
            assert (split - direct).norm() < 1e-5 * direct.norm()


def test_finetuning_from_them_on_any_ranks_and_what_is_trained_goes_back(ranks, tmp_path):
    save_llama(tmp_path / "hf", "llama3-tied")
    ranks(1, convert, "to-megatron", tmp_path / "hf", tmp_path / "run")
    (expected,) = ranks(1, finetune, tmp_path / "run", None, {})
    for losses in ranks(4, finetune, tmp_path / "run", tmp_path / "trained", {CP: 2, PP: 2}):
        assert losses == pytest.approx(expected, rel=1e-5)
    ranks(1, convert, "to-hf", tmp_path / "trained", tmp_path / "back")
    tokens = torch.arange(96)[None] % VOCABULARY
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back")(tokens).logits
    (ours,) = ranks(1, logits, tmp_path / "trained")
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    first, last = SafetensorsFolder(tmp_path / "hf"), SafetensorsFolder(tmp_path / "back")
    assert all(not torch.equal(first.read(name), last.read(name)) for name in first.names)  # it was trained


def as_if_trained_on_chats(folder: Path) -> None:
    convert("to-megatron", folder / "hf", folder / "run")
    run = folder / "run" / "iter_0000000"
    with patch.object(saved_flags, "read_saved_args", return_value=read_saved_args(run) | {"sft": True}):
        convert("to-hf", folder / "run", folder / "chats")


def test_the_tokenizer_and_all_end_tokens_come_back(ranks, tmp_path):
    """The folder has an old end token, 200; the tokenizer and the template of chats have others."""
    save_llama(tmp_path / "hf", "llama3", vocab_size=259)
    save_tokenizer(tmp_path / "hf", chat=True)
    GenerationConfig(eos_token_id=[200], temperature=0.6, do_sample=True).save_pretrained(tmp_path / "hf")
    ranks(1, there_and_back, tmp_path)
    first, last = (HuggingFaceTokenizer(str(tmp_path / name), special=True) for name in ("hf", "back"))
    assert first.ends == last.ends == {2, 200}
    said = [{"role": "user", "content": "a é"}]
    assert last.encode("a é") == first.encode("a é") and last.chat(said) == first.chat(said)
    between = text_tokenizer(model_arguments(Source(load=str(tmp_path / "run"))))
    assert between.encode("a é") == first.encode("a é") and between.encode("a")[0] == 1  # which begins each text
    assert between.ends == first.ends
    written = GenerationConfig.from_pretrained(tmp_path / "back")  # all that transformers' generate reads
    assert written.temperature == 0.6 and written.eos_token_id == [200, 2]
    assert AutoConfig.from_pretrained(tmp_path / "back").eos_token_id == [200, 2]
    (tmp_path / "hf" / "chat_template.jinja").write_text(CHAT.replace("{% endfor %}", "<unk>{% endfor %}"))
    shutil.rmtree(tmp_path / "run")
    ranks(1, as_if_trained_on_chats, tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path / "chats").eos_token_id == [200, 0, 2]


@contextmanager
def anonymous_memory(most: list[int]):
    """Appends to `most` the largest growth of memory in bytes, without pages of files."""

    def now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

    def sample() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], now() - before)

    before, over = now(), threading.Event()
    most.append(0)
    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def memory_of_both_ways(folder: Path) -> tuple[list[int], int]:
    small, most = folder / "small", list[int]()
    save_llama(small / "hf", "llama3")
    there_and_back(small)  # what is imported and allocated once
    save_llama(folder / "hf", "llama3", hidden_size=256, intermediate_size=640, num_hidden_layers=40, vocab_size=1000)
    size = sum(path.stat().st_size for path in (folder / "hf").glob("*.safetensors"))
    with anonymous_memory(most):
        convert("to-megatron", folder / "hf", folder / "run")
    with anonymous_memory(most):
        convert("to-hf", folder / "run", folder / "back", "--max-shard-size", "2MB")
    return most, size


def test_memory_does_not_grow_with_the_model(ranks, tmp_path):
    ((most, size),) = ranks(1, memory_of_both_ways, tmp_path)
    assert size > 80e6
    assert max(most) < size / 4, most


def refusals(folder: Path) -> list[str]:
    def said(*words: object) -> None:
        with pytest.raises(UsageError) as caught:
            convert(*words)
        lines.append(str(caught.value))

    lines: list[str] = []
    hf, run = folder / "hf", folder / "run"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # a file of a weight that is larger than the disk takes
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
        said("to-megatron", hf, folder / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [*(folder / "full").iterdir()] == []
    convert("to-megatron", hf, run)
    said("to-megatron", hf, run)
    said("to-hf", run, hf)
    (hf / "model.safetensors").unlink()
    said("to-megatron", hf, folder / "none")
    with pytest.raises(UsageError) as caught:
        training_case.train("llama", load=str(run))
    lines.append(str(caught.value))
    with pytest.raises(UsageError) as caught:
        to_folder(training_case.case_args("gpt3", load="gpt3"), None, run, folder / "back", 1, print)
    lines.append(str(caught.value))
    return lines


def test_what_cannot_be_converted_is_told(ranks, tmp_path, monkeypatch):
    save_llama(tmp_path / "hf", "llama2", max_shard_size="1GB", hidden_size=256, vocab_size=1000)
    (said,) = ranks(1, refusals, tmp_path)
    for line, part in zip(
        said,
        (
            "full: iteration 0 was not saved: File too large",
            "run: already contains checkpoints; give a new directory",
            "hf: not an empty folder; give a new one",
            "hf: contains neither model.safetensors nor model.safetensors.index.json",
            "so there is no run to resume; add --finetune",
            "trained with position_embedding_type learned_absolute: no llama, mistral, qwen2, qwen3, qwen3_moe,",
        ),
        strict=True,
    ):
        assert part in line and "\n" not in line, line
    for words, part in (
        (["to-megatron", "--load", str(tmp_path), "--save", "x"], "contains no config.json; give a HuggingFace folder"),
        (["to-hf", "--load", str(tmp_path / "hf"), "--save", "x"], "already a HuggingFace folder; give the --save"),
    ):
        with pytest.raises(UsageError, match=part):
            convert_hf.main(words)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="WORLD_SIZE=2: the conversion uses one process"):
        convert_hf.main(["to-hf", "--load", "x", "--save", "y"])
