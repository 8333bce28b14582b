"""Small corpora, and the arguments and data sets of a run on them."""

import json

from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron.context_parallel.commands import preprocess_data
from megatron.context_parallel.trainer.data.batches import build_datasets
from megatron.context_parallel.trainer.data.tokenizer import build_tokenizer
from tests.support.case_args import CaseArgs

EOD = 256

SEQUENCE = 32


def preprocess(tmp_path, *flags: str, prefix: str = "out") -> IndexedDataset:
    preprocess_data.main(["--output-prefix", str(tmp_path / prefix), *map(str, flags)])
    return IndexedDataset(str(tmp_path / f"{prefix}_text_document"))


def corpus(tmp_path, documents: int = 40) -> str:
    """A prefix whose documents have 20 to 56 bytes each, with bytes that other tokenizers use for padding."""
    lines = [json.dumps({"text": f"\x01{number:03d}" * (5 + number % 10)}) for number in range(documents)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
    preprocess(tmp_path, "--input", tmp_path / "corpus.jsonl", "--append-eod", prefix="corpus")
    return str(tmp_path / "corpus_text_document")


def arguments(tmp_path, **changes) -> CaseArgs:
    values = {
        "tokenizer_type": "ByteLevelTokenizer",
        "tokenizer_model": None,
        "vocab_size": None,
        "vocabulary": 257,
        "data_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "split": "80,20,0",
        "data_cache_path": str(tmp_path / "cache"),
        "seq_length": SEQUENCE,
        "seed": 1234,
        "eod_mask_loss": False,
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "cp_place_documents": False,
        "eod_token": EOD,
        "micro_batch_size": 2,
        "num_workers": 0,
        "mock_data": False,
        "sft": False,
        "pack_documents": False,
        "skip_train": False,
    }
    return CaseArgs(**(values | changes))


def datasets(args: CaseArgs, *sizes: int):
    return build_datasets(args, build_tokenizer(args), sizes)
