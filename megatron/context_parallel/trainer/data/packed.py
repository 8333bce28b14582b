"""Datasets of samples that hold whole documents, packed by best fit. Tokens that fill a sample up are of no document.

A document of n tokens takes n - 1 rows of a sample: its last token is only a label.
"""

from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from .best_fit import best_fit
from .chat_tokens import ChatTokens, save_array

PADDING = 0  # a token that nothing sees and that has no loss
NO_DOCUMENT = -1


class PackedDocuments(MegatronDataset):
    """Documents of `.bin/.idx` files. One that is longer than a sample is cut into pieces.

    A sample has `tokens`, `labels`, `position_ids` int64, `loss_mask` float32 and `document_ids` int64, each
    [sequence length]. Positions begin with each document. A document id is below 0 where a sample is filled up.

    Every epoch has the same samples, in another order. Sample i is of epoch i // (samples of an epoch).
    """

    kind = "documents"
    changed = "cut"  # what happened to long ones

    def __init__(
        self,
        dataset: Any,
        dataset_path: str,
        indices: numpy.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.rows = config.sequence_length
        self.pieces, self.bounds = self._load()
        self.per_epoch = len(self.bounds) - 1
        self._order = -1, numpy.empty(0, int)  # an epoch, and the order of its samples
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(self._summary(), flush=True)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Any:
        return IndexedDataset(dataset_path)

    def __len__(self) -> int:
        return self.per_epoch if self.num_samples is None else self.num_samples

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        epoch, place = divmod(int(number), self.per_epoch)
        sample = self._order_of(epoch)[place]
        pieces = self.pieces[self.bounds[sample] : self.bounds[sample + 1]].tolist()
        made = {name: numpy.zeros(self.rows, numpy.int64) for name in ("labels", "position_ids")}
        made["tokens"] = numpy.full(self.rows, PADDING)
        made["loss_mask"] = numpy.zeros(self.rows, numpy.float32)
        made["document_ids"] = numpy.full(self.rows, NO_DOCUMENT)
        begin = 0
        for document_id, (document, first, rows) in enumerate(pieces):
            ids, learned = self._tokens(document, first, rows + 1)
            here = slice(begin, begin + rows)
            made["tokens"][here] = ids[:-1]
            made["labels"][here] = ids[1:]
            made["loss_mask"][here] = learned[1:]
            made["position_ids"][here] = numpy.arange(rows)
            made["document_ids"][here] = document_id
            begin += rows
        return {name: torch.from_numpy(array) for name, array in made.items()}

    def _tokens(self, document: int, first: int, count: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Token ids of a document from its token `first` on, int64 [count], and whether each is learned: bool."""
        ids = self.dataset.get(document, first, count).astype(numpy.int64)
        return ids, numpy.ones(count, bool)

    def _pieces_of(self, rows: numpy.ndarray) -> numpy.ndarray:
        """How many pieces each document has: int64 [documents]."""
        return -(-rows // self.rows)

    def _order_of(self, epoch: int) -> numpy.ndarray:
        if self._order[0] != epoch:
            seeds = [self.config.random_seed, epoch]
            self._order = epoch, numpy.random.RandomState(seeds).permutation(self.per_epoch)
        return self._order[1]

    def _load(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The pieces, sample after sample, and the first piece of each sample; from the cache if they are there."""
        cache = Path(self.config.path_to_cache)
        paths = [cache / f"{self.unique_description_hash}-packed-{name}.npy" for name in ("pieces", "bounds")]
        if not all(path.exists() for path in paths):
            cache.mkdir(parents=True, exist_ok=True)
            for path, array in zip(paths, self._pack(), strict=True):
                save_array(path, array)
        pieces, bounds = (numpy.load(path, mmap_mode="r") for path in paths)
        return pieces, bounds

    def _pack(self) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Pieces, int64 [pieces, 3]: document, first token and rows. And the bounds of samples: int64 [samples + 1]."""
        lengths = self.dataset.sequence_lengths[self.indices].astype(numpy.int64)
        rows = numpy.maximum(lengths - 1, 0)
        counts = self._pieces_of(rows)
        of = numpy.repeat(numpy.arange(len(rows)), counts)  # the document of each piece
        first = (numpy.arange(len(of)) - numpy.repeat(counts.cumsum() - counts, counts)) * self.rows
        pieces = numpy.stack((self.indices[of], first, numpy.minimum(rows[of] - first, self.rows)), axis=1)
        # Of equally long pieces, the first fits best: the seed decides which.
        pieces = pieces[numpy.random.RandomState(self.config.random_seed).permutation(len(pieces))]
        samples = best_fit(pieces[:, 2], self.rows)
        bounds = numpy.append(0, numpy.bincount(samples).cumsum())
        return pieces[numpy.argsort(samples, kind="stable")], bounds

    def _summary(self) -> str:
        """A line about the samples of an epoch."""
        padding = 1 - self.pieces[:, 2].sum() / (self.per_epoch * self.rows)
        lengths = self.dataset.sequence_lengths[self.indices]
        too_long = int((lengths > self.rows + 1).sum())
        samples = f"{self.per_epoch} samples of {self.rows} tokens from {len(self.indices)} {self.kind}"
        ending = f", {padding:.1%} padding, {too_long} {self.changed}"
        return f"{self.index_split.name} data: {samples} of {self.dataset.path_prefix}{ending}"


class PackedChats(PackedDocuments):
    """Chats, of which only the answers are learned. One that is longer than a sample loses its end."""

    kind = "chats"
    changed = "truncated"

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> ChatTokens:
        return ChatTokens(dataset_path, Path(config.path_to_cache))

    def _tokens(self, document: int, first: int, count: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        stored = self.dataset.get(document, first, count).astype(numpy.int64)
        learned = stored >= 0
        return numpy.where(learned, stored, ~stored), learned

    def _pieces_of(self, rows: numpy.ndarray) -> numpy.ndarray:
        return (rows > 0).astype(numpy.int64)
