"""From `.bin/.idx` files or chats to micro batches, with megatron-core's datasets or packed ones."""

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import get_idx_path
from megatron.core.datasets.utils import Split, get_blend_from_list
from torch.utils.data import DataLoader, Dataset, Sampler

from megatron.context_parallel.cli.flag_checks import refuse
from megatron.context_parallel.cli.layer_list import chosen_layers
from megatron.context_parallel.cluster.description import load_cluster
from megatron.context_parallel.cluster.step.placement_costs import costs_of_run
from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.torch_data_workers import forget_workers
from megatron.context_parallel.runtime.comm.first_rank import on_first_rank
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.place_documents import place
from megatron.context_parallel.tokens.placement import Placement
from megatron.context_parallel.trainer.config.flags import Arguments
from megatron.context_parallel.trainer.config.workload import model_of, run_of

from .chat_template import ChatTemplate
from .chat_tokens import write_chat_tokens
from .index_cache import drop_damaged, record
from .packed import PackedChats, PackedDocuments
from .tokenizer import TokenIds, tokenizer_files
from .worker_end import prepare_worker

Splits: TypeAlias = tuple[Dataset | None, Dataset | None, Dataset | None]
Batch: TypeAlias = dict[str, Any]  # a tensor [micro batch, sequence] for each of KEYS, and documents
KEYS = ("tokens", "labels", "loss_mask", "position_ids")
SAMPLED = 3  # micro batches that stand for all
UNTIL_REPORTED = 1.0  # seconds after which the system has reported the end of a killed worker
PLACED_FOR = "dgx-h100"  # the cluster for which documents are placed, if no other is named


def build_datasets(args: Arguments, tokenizer, train_val_test_num_samples: tuple[int, int, int]) -> Splits:
    """The train, valid and test datasets, each with at least the requested samples; None if 0 samples are requested.

    Every rank must call this. Rank 0 writes the sample indices to the cache, then the other ranks read them. So the
    cache (`args.data_cache_path`, by default `cache/` beside the data) must be on a file system that all nodes share.
    A sample is a dict of tensors of length `args.seq_length`: `tokens`, `labels` and `position_ids` int64,
    `loss_mask` float32. With `--sft` or `--pack-documents` it also has `document_ids` (`PackedDocuments`).

    Raises UsageError if a requested split contains no token, if no data is named, if files without weights have too few
    samples, if the cache is not writable, or if chats are wrong.
    """
    config = _dataset_config(args, tokenizer)
    for split in Split:
        # A split without requested samples is left out: if it is empty, megatron-core would search it forever.
        if train_val_test_num_samples[split.value] == 0:
            (config.blend_per_split or config.split_matrix)[split.value] = None
    if args.mock_data:
        return tuple(BlendedMegatronDatasetBuilder(MockGPTDataset, train_val_test_num_samples, _always, config).build())
    kind = PackedChats if args.sft else PackedDocuments if args.pack_documents else GPTDataset
    cache = Path(config.path_to_cache)
    with _writable(cache):
        _on_first_rank(partial(_prepare, args, config, cache))
        _check_splits(args, config, kind)
        builder = BlendedMegatronDatasetBuilder(kind, train_val_test_num_samples, _always, config)
        datasets = tuple(builder.build())
        _on_first_rank(partial(record, cache))
    _check_lengths(args, datasets, train_val_test_num_samples)
    return datasets


def _always() -> bool:
    return True


def _on_first_rank(work: Callable[[], None]) -> None:
    """Run `work` on the first rank if there are several; its error is raised on every rank."""
    if dist.is_initialized():
        on_first_rank(work)
    else:
        work()


@contextmanager
def _writable(cache: Path) -> Iterator[None]:
    """Turns an OSError into a UsageError about the cache."""
    try:
        yield
    except Exception as error:
        reason = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(reason, OSError):
            raise
        why = f"{reason.filename or cache}: {reason.strerror or reason}"
        raise UsageError(f"{why}; give a --data-cache-path DIR that is writable and has free space") from error


def _prepare(args: Arguments, config: GPTDatasetConfig, cache: Path) -> None:
    """Remove damaged files from the cache, and write the tokens of chats to it."""
    for damaged in drop_damaged(cache):
        print(f"{damaged} is truncated or damaged; rebuilding it", flush=True)
    if args.sft:
        assert args.tokenizer_model  # which its tokenizer needs
        template = ChatTemplate(args.tokenizer_model)
        for path in sorted(set(_prefixes(config))):
            write_chat_tokens(path, cache, template)


def _dataset_config(args: Arguments, tokenizer) -> GPTDatasetConfig:
    per_split = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if any(per_split):
        source: dict[str, Any] = {"blend_per_split": [get_blend_from_list(paths) for paths in per_split]}
    elif args.mock_data:
        source = {"split": args.split}
    elif args.data_path:
        source = {"blend": get_blend_from_list(args.data_path), "split": args.split}
    else:
        raise UsageError("--data-path is missing; give a prefix written by tools/preprocess_data.py")
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        path_to_cache=args.data_cache_path,
        tokenizer=TokenIds(tokenizer.eod, tokenizer.vocab_size, tokenizer.unique_identifiers),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=False,  # attention gets documents by their end tokens, not as a square mask
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        **source,
    )
    if prefixes := _prefixes(config):
        config.path_to_cache = _cache_path(args, prefixes)
    return config


def _prefixes(config: GPTDatasetConfig) -> list[str]:
    """The prefixes of all splits, or their files of chats."""
    blends = config.blend_per_split or [config.blend]
    return [prefix for blend in blends if blend for prefix in blend[0]]


def _cache_path(args: Arguments, prefixes: list[str]) -> str:
    """A separate cache folder for these document lengths or chats, so that what is made of other data is never used."""
    if args.sft:
        assert args.tokenizer_model
        files = [*map(Path, prefixes), *tokenizer_files(args.tokenizer_model)]
    else:
        files = [Path(get_idx_path(prefix)) for prefix in prefixes]
    digest = hashlib.sha256()
    for path in files:
        with open(path, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    root = args.data_cache_path or os.path.join(os.path.dirname(prefixes[0]), "cache")
    return os.path.join(root, digest.hexdigest()[:16])


def _check_splits(args: Arguments, config: GPTDatasetConfig, kind: type[GPTDataset | PackedDocuments]) -> None:
    fewest = 1 if kind is GPTDataset else 2  # the first token of a packed document is never a label
    for split in Split:
        if config.blend_per_split:
            blend, share = config.blend_per_split[split.value], (0.0, 1.0)
        else:
            blend, share = config.blend, config.split_matrix[split.value]
        if split is Split.train and not args.skip_train and not (blend and share):
            raise UsageError(f"--split {args.split} leaves no training data; give --split 969,30,1")
        for prefix in blend[0] if blend and share else ():
            data = kind.build_low_level_dataset(prefix, config)  # keeps its arrays alive
            lengths = data.sequence_lengths
            begin, end = (round(edge * len(lengths)) for edge in share)
            if (lengths[begin:end] < fewest).all():
                raise UsageError(_empty_split(args, split.name, prefix, len(lengths)))


def _empty_split(args: Arguments, split: str, prefix: str, documents: int) -> str:
    if split == "train":
        remedy = "--split 100,0,0 and --eval-iters 0"
    else:
        remedy = "more documents, a larger share such as --split 80,10,10, or --eval-iters 0"
    return f"--split {args.split} leaves no token of {prefix} ({documents} documents) for {split}; give {remedy}"


def _check_lengths(args: Arguments, datasets: Splits, requested: tuple[int, int, int]) -> None:
    """Reject several files without weights if they have too few samples: megatron-core reads each of them once."""
    for split, dataset, needed in zip(Split, datasets, requested, strict=True):
        if not isinstance(dataset, BlendedDataset) or len(dataset) >= needed:
            continue
        name = f"{split.name}_data_path" if args.train_data_path else "data_path"
        weighted = []
        for prefix, own in zip(getattr(args, name), dataset.datasets, strict=True):
            weighted += [len(own), prefix]
        why = f"files without weights are read once, which gives {len(dataset)} of {needed} samples for {split.name}"
        refuse(args, name, why, **{name: weighted})


class MicroBatches(Sampler[range]):
    """Sample numbers of one data-parallel rank's micro batches, after `consumed` samples.

    Each group of `dp_size * micro` consecutive samples is distributed over the ranks in order, so the samples of a
    global batch do not depend on the number of ranks. An incomplete last group is dropped.
    """

    def __init__(self, samples: int, consumed: int, micro: int, dp_rank: int, dp_size: int) -> None:
        group = micro * dp_size
        first = consumed + dp_rank * micro
        self.starts = range(first, consumed + (samples - consumed) // group * group, group)
        self.micro = micro

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[range]:
        return (range(start, start + self.micro) for start in self.starts)


def build_data_iterator(
    dataset: Dataset, args: Arguments, consumed_samples: int, dp_rank: int, dp_size: int, note: Callable[[str], None]
) -> Iterator[Batch]:
    """Micro batches of `dp_rank`, after `consumed_samples` samples (of all ranks) of the dataset.

    Each is a dict of CPU tensors of shape [micro batch, sequence]: `tokens`, `labels`, `position_ids`
    int64, `loss_mask` float32. With `--reset-attention-mask` or packed documents it also has their `documents`, which
    the loader's workers make. Tensor, pipeline and context-parallel ranks of one `dp_rank` get the same.
    The iterator ends where the dataset cannot fill a micro batch of every rank. No global random number
    is drawn.

    If a token is not in the vocabulary, `note` gets a line that names the token and its file. The batch then contains
    another token instead and must not be trained on.
    """
    assert isinstance(dataset, Sized)
    batches = MicroBatches(len(dataset), consumed_samples, args.micro_batch_size, dp_rank, dp_size)
    loader = DataLoader(
        dataset,
        batch_sampler=batches,  # type: ignore[arg-type]  # ranges serve as lists of numbers do
        num_workers=args.num_workers,
        collate_fn=partial(collate, **document_options(args)),
        generator=torch.Generator(),  # otherwise the loader seeds its workers from the global generator
        worker_init_fn=prepare_worker,
    )
    # A generator, so that loader workers start with the first batch. Some ranks never ask for one.
    for samples, batch in zip(batches, _received(_started(loader)), strict=True):
        for name in ("tokens", "labels"):
            smallest, largest = torch.aminmax(batch[name])
            if smallest < 0 or largest >= args.vocabulary:
                note(_wrong_token(dataset, samples, batch[name], args.vocabulary))
                batch[name].clamp_(0, args.vocabulary - 1)
        yield batch


def _started(loader: DataLoader) -> Iterator[Batch]:
    try:
        return iter(loader)
    except OSError as error:
        if error.errno == errno.EMFILE:  # reported when the rank ends
            raise
        forget_workers()
        why = f"{error.strerror}{' in /dev/shm' if error.errno == errno.ENOSPC else ''}"
        raise UsageError(f"--num-workers {loader.num_workers}: the workers cannot start ({why}); give 0") from error


def _received(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches of the workers. A worker that is killed closes its connections before the system reports its end."""
    try:
        yield from batches
    except (ConnectionError, EOFError):
        time.sleep(UNTIL_REPORTED)  # then torch raises an error that names the worker
        raise


def _wrong_token(dataset: Dataset, samples: range, tokens: torch.Tensor, vocabulary: int) -> str:
    row, column = torch.nonzero((tokens < 0) | (tokens >= vocabulary))[0].tolist()
    sample = samples[row]
    own: Any = dataset
    number = sample
    if isinstance(dataset, BlendedDataset):
        own = dataset.datasets[dataset.dataset_index[sample]]
        number = dataset.dataset_sample_index[sample]
    prefix = own.dataset.path_prefix
    return (
        f"{prefix}: sample {number} has token {tokens[row, column]}, but the vocabulary has {vocabulary} tokens; "
        f"locate it with tools/preprocess_data.py --check {prefix}"
    )


def document_options(args: Arguments) -> dict[str, Any]:
    """The arguments of `collate` about documents."""
    if not args.reset_attention_mask:
        return {"end": None}
    if not args.cp_place_documents:
        return {"end": args.eod_token}
    n = args.cp_layers[0].plan(args.context_parallel_size).n
    layers = chosen_layers(args.window_attn_skip_freq, args.num_layers if args.window_attn_skip_freq else 1)
    windows = [(args.window_size or (-1, -1)) if here else (-1, -1) for here in layers]
    cluster = args.cp_measured or load_cluster(args.cp_cluster or PLACED_FOR)
    costs = costs_of_run(model_of(args), run_of(args), cluster)
    return {"end": args.eod_token, "place": partial(place, n=n, costs=costs, windows=windows)}


def sample_documents(args: Arguments, dataset: Dataset | None) -> list[Documents]:
    """The documents of the first micro batches of a dataset, not placed; none if the run does not keep them apart."""
    if dataset is None or not args.reset_attention_mask:
        return []
    args = replace(args, cp_place_documents=False, num_workers=0)
    batches = build_data_iterator(dataset, args, 0, 0, args.data_parallel_size, lambda line: None)
    return [batch["documents"] for batch in islice(batches, SAMPLED)]


def collate(
    samples: list[dict[str, torch.Tensor]], end: int | None, place: Callable[[Documents], Placement] | None = None
) -> Batch:
    """A batch of samples, with the documents that they tell, or else those that token `end` ends; placed by `place`."""
    batch: Batch = {}
    for key in KEYS:
        batch[key] = torch.stack([sample[key] for sample in samples])
    if "document_ids" in samples[0]:
        documents = Documents(torch.stack([sample["document_ids"] for sample in samples]))
    elif end is not None:
        documents = Documents.after(batch["tokens"] == end)
    else:
        return batch
    batch["documents"] = documents.placed(place(documents)) if place else documents
    return batch
