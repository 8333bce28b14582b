"""Converts a HuggingFace folder to a checkpoint of the trainer, with one weight in memory at a time."""

import io
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import yaml
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.integration.huggingface.folder import SafetensorsFolder
from megatron.context_parallel.integration.huggingface.weights import check_names, fill
from megatron.context_parallel.runtime.comm.first_rank import DiskError
from megatron.context_parallel.trainer.checkpoint.publish import publish
from megatron.context_parallel.trainer.checkpoint.storage import begin_save, cause_of, not_saved
from megatron.context_parallel.trainer.checkpoint.store import iteration_directory, iterations, plain_args
from megatron.context_parallel.trainer.config.flags import FLAGS, Arguments
from megatron.context_parallel.trainer.data.tokenizer import vocabulary
from megatron.context_parallel.trainer.model.meta_model import Done, chunk_of, shards_of

FLAGS_FILE = "model.yaml"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_NOT_OF_MODEL = ("make_vocab_size_divisible_by", "max_position_embeddings", "bf16", "fp16")


def to_megatron(args: Arguments, model: GPTModel, save: str, done: Done) -> None:
    """Write the HuggingFace folder in `args.load` as iteration 0 of `save`, and `model.yaml` with its flags.

    Args:
        args: the arguments of the folder's model, on one rank.
        model: the outline of the model.
        save: a new directory of checkpoints.
        done: called for each weight that is written, with its bytes.

    Raises:
        UsageError: the weights do not match config.json, or `save` has checkpoints or is not writable.
    """
    assert args.load
    if iterations(save):
        raise UsageError(f"--save {save}: already contains checkpoints; give a new directory")
    source = SafetensorsFolder(Path(args.load))
    check_names(model, source)
    args = replace(_with_tokenizer(args, Path(args.load).resolve()), save=save)
    final = iteration_directory(save, 0)
    temporary = final.with_name(final.name + ".incomplete")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        begin_save(args)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write(temporary, _Planner(model, source, args.vocabulary, done))
        publish(temporary, final, plain_args(args) | {"converted_from": str(source.folder)}, {})
        (final.parent / FLAGS_FILE).write_text(_flags_file(args))
    except (OSError, RuntimeError) as error:
        cause = cause_of(error, final.parent)
        if not isinstance(cause, OSError):
            raise
        disk = DiskError(cause.errno, cause.strerror, cause.filename)
        raise UsageError(not_saved(args, 0, disk)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _with_tokenizer(args: Arguments, folder: Path) -> Arguments:
    """`args` for the checkpoint: with the tokenizer of the folder, or without one with NullTokenizer."""
    args = replace(args, load=None, seq_length=args.max_position_embeddings, no_save_optim=True, no_save_rng=True)
    if not any((folder / name).exists() for name in _TOKENIZERS):
        return replace(args, tokenizer_type="NullTokenizer", vocab_size=args.vocabulary - 1)
    args = replace(args, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder))
    tokens, eod = vocabulary(args)
    if tokens > args.vocabulary:
        why = f"its tokenizer has {tokens} tokens, but its weights are for {args.vocabulary}"
        raise UsageError(f"--load {folder}: {why}; remove the tokens that were added to the tokenizer")
    return replace(args, eod_token=eod)


def _flags_file(args: Arguments) -> str:
    """The flags that decide the model and its tokenizer, in the format of `--config`."""
    names = [name for name, flag in FLAGS.items() if flag.decides in ("weights", "model")]
    names += ["group_query_attention", "tokenizer_model", *_NOT_OF_MODEL]
    values: dict[str, Any] = {}
    for name in names:
        flag = FLAGS[name]
        value = getattr(args, name)
        if value != flag.default:
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
            values[flag.option.removeprefix("--")] = True if flag.kind is bool else shown
    return yaml.safe_dump(values, sort_keys=False)


def _write(folder: Path, planner: "_Planner") -> None:
    """Write all files of a checkpoint except arguments and manifest, in megatron-core's format."""
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=False, sync_files=False)
    try:
        dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
    except dcp.api.CheckpointException as error:
        raise error.failures[0][0] from None
    torch.save({}, folder / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist"), str(folder))


class _Planner(SavePlanner):
    """Plans for PyTorch's writer; each weight is read when it is written."""

    def __init__(self, model: GPTModel, source: SafetensorsFolder, vocabulary: int, done: Done) -> None:
        self.model, self.source, self.vocabulary, self.done = model, source, vocabulary, done
        self.wanted: dict[MetadataIndex, tuple[str, ShardedTensor | ShardedObject]] = {}

    def set_up_planner(self, state_dict: dict, storage_meta: object = None, is_coordinator: bool = False) -> None:
        """Does nothing: the weights are not in a state_dict."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, shards in shards_of(self.model).items():
            for shard in shards:
                item = _object_item(shard) if isinstance(shard, ShardedObject) else _tensor_item(shard)
                self.wanted[item.index] = name, shard
                items.append(item)
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans, rewrite_index_hints=False)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name, shard = self.wanted[write_item.index]
        if isinstance(shard, ShardedObject):
            stream = io.BytesIO()
            torch.save([shard.data], stream)
            return stream
        like = self.model.get_parameter(name)
        whole = torch.empty(like.shape, dtype=like.dtype)
        fill(name, whole, self.source, self.model.config, self.vocabulary)
        places = zip(shard.global_offset[shard.prepend_axis_num :], shard.local_shape, strict=True)
        part = whole[tuple(slice(start, start + size) for start, size in places)]
        self.done(part.nbytes)
        return part.reshape(chunk_of(shard).sizes)


def _tensor_item(shard: ShardedTensor) -> WriteItem:
    chunk = chunk_of(shard)
    data = TensorWriteData(chunk, TensorProperties(dtype=shard.dtype), torch.Size(shard.global_shape))
    return WriteItem(MetadataIndex(shard.key, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _object_item(shard: ShardedObject) -> WriteItem:
    return WriteItem(MetadataIndex(shard.unique_key), WriteItemType.BYTE_IO)
