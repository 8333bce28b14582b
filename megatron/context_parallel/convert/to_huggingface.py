"""Converts a checkpoint of the trainer to a HuggingFace folder, with one file of weights in memory at a time."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.inference.tokenizer import HuggingFaceTokenizer, end_tokens
from megatron.context_parallel.integration.huggingface.config import config_of
from megatron.context_parallel.integration.huggingface.folder import write_safetensors
from megatron.context_parallel.integration.huggingface.weights import to_huggingface
from megatron.context_parallel.trainer.checkpoint.plain_read import plain_reads
from megatron.context_parallel.trainer.checkpoint.saved_flags import is_of_chats
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.model.meta_model import Done, bytes_of, chunk_of, shards_of

_TEXT_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab.json",
    "merges.txt",
)
_GENERATION = "generation_config.json"  # it may have more end tokens than config.json
_OF_TEXT = ("bos_token_id", "eos_token_id", "pad_token_id")


def to_folder(args: Arguments, model: GPTModel, checkpoint: Path, folder: Path, most_bytes: int, done: Done) -> None:
    """Write a checkpoint of the trainer as a HuggingFace folder, with the files of its tokenizer.

    Args:
        args: the arguments of the checkpoint's model, on one rank.
        model: the outline of the model.
        checkpoint: the folder `iter_NNNNNNN`.
        folder: created; it must be empty if it exists.
        most_bytes: maximum size of a file of weights.
        done: called for each weight that is written, with its bytes.

    Raises:
        UsageError: HuggingFace has no such model, or the folder is not empty or not writable.
    """
    try:
        config = config_of(vars(args), args.vocabulary)
    except UsageError as error:
        raise UsageError(f"--load {args.load}: trained with {error}") from None
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"--save {folder}: not an empty folder; give a new one")
    temporary = folder.with_name(folder.name + ".incomplete")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        free = shutil.disk_usage(temporary).free
        needed = bytes_of(model)
        if free < needed:
            raise OSError(f"its weights need {needed / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free")
        _add_tokenizer(args, config, temporary)
        weights = to_huggingface(_weights_of(model, checkpoint, done), model.config, args.vocabulary)
        write_safetensors(temporary, weights, most_bytes)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        temporary.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--save {folder}: cannot be written ({error}); free some space, or give another") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _weights_of(model: GPTModel, checkpoint: Path, done: Done) -> Iterator[tuple[str, torch.Tensor]]:
    reader = dcp.FileSystemReader(checkpoint)
    with plain_reads(checkpoint):
        metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    for name, shards in shards_of(model).items():
        tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
        if not tensors:
            continue
        like = model.get_parameter(name)
        whole = torch.zeros(like.shape, dtype=like.dtype)
        items = _read_items(tensors, metadata, model.vocabulary)
        reader.read_data(LoadPlan(items), _Into(whole, tensors[0].prepend_axis_num)).wait()
        yield name, whole
        done(whole.nbytes)


def _read_items(shards: list[ShardedTensor], metadata: Metadata, vocabulary: int) -> list[ReadItem]:
    """The read requests for the parts of a weight. A token table may have another number of padding rows."""
    key = shards[0].key
    chunks = [chunk_of(shard) for shard in shards]
    saved = metadata.state_dict_metadata.get(key)
    shape = shards[0].global_shape
    if not isinstance(saved, TensorStorageMetadata):
        raise RuntimeError(f"{key}: not in the checkpoint")
    if tuple(saved.size) != tuple(shape) and not shards[0].allow_shape_mismatch:
        raise RuntimeError(f"{key}: has shape {tuple(saved.size)} in the checkpoint, not {tuple(shape)}")
    items = create_read_items_for_chunk_list(key, saved, chunks)
    found = sum(math.prod(item.lengths) for item in items)
    needed = sum(math.prod(chunk.sizes) for chunk in chunks)
    if shards[0].allow_shape_mismatch:
        needed = vocabulary * shape[-1]
    if found < needed:
        raise RuntimeError(f"{key}: {found} of {needed} elements are in the checkpoint")
    return items


class _Into(DefaultLoadPlanner):
    """Copies PyTorch's reads into a weight, which lacks the first `axes` dimensions of its shape in the checkpoint."""

    def __init__(self, whole: torch.Tensor, axes: int) -> None:
        super().__init__()
        self.whole, self.axes = whole, axes

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        assert read_item.dest_index.offset is not None
        starts = [a + b for a, b in zip(read_item.dest_index.offset, read_item.dest_offsets, strict=True)]
        places = zip(starts, read_item.lengths, strict=True)
        part = self.whole[tuple(slice(start, start + size) for start, size in [*places][self.axes :])]
        return part.view(read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Does nothing: the tensor was written in place."""


def _add_tokenizer(args: Arguments, config: dict[str, Any], folder: Path) -> None:
    """Copies the files of the run's tokenizer, and adds the ids of special tokens to `config`.

    Every reader shall end texts where this project does, but transformers takes end tokens from one file only.
    """
    if args.tokenizer_type != "HuggingFaceTokenizer":
        return
    assert args.tokenizer_model
    source = Path(args.tokenizer_model)
    for path in {path for pattern in _TEXT_FILES for path in source.glob(pattern) if path.is_file()}:
        shutil.copyfile(path, folder / path.name)
    theirs = _read_json(source / "config.json")
    config.update({name: theirs[name] for name in _OF_TEXT if name in theirs})
    tokenizer = HuggingFaceTokenizer(args.tokenizer_model, special=False, chats=is_of_chats(args))
    if not tokenizer.ends:
        return
    first = end_tokens(source)  # transformers fills up batches with the first one
    ends = [*first, *sorted(tokenizer.ends.difference(first))]
    config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if (source / _GENERATION).is_file():
        texts = _read_json(source / _GENERATION) | {"eos_token_id": config["eos_token_id"]}
        (folder / _GENERATION).write_text(json.dumps(texts, indent=2) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    """The fields of a file of the tokenizer's folder; none if there is no such file."""
    if not path.is_file():
        return {}
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({error}); copy it again") from None
    if not isinstance(fields, dict):
        raise UsageError(f"{path}: contains no fields; copy it again")
    return fields
