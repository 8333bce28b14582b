"""What packed documents cost in each layout and in a placement of their own: `--documents` of cp-plan."""

import re
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from megatron.context_parallel import LAYOUTS, UsageError
from megatron.context_parallel.tokens.chunk_loads import ChunkLoads, chunk_loads
from megatron.context_parallel.tokens.documents import Documents
from megatron.context_parallel.tokens.layout import Chunks
from megatron.context_parallel.tokens.mask import Mask
from megatron.context_parallel.tokens.place_documents import Costs, place

PLACED = "placement"
SEED = 0
LENGTH = r"[1-9]\d{0,17}(x[1-9]\d{0,17})?"
GOOD = "give lengths, such as 8192,1024x20, or lognormal:1100,1.5, a text file of lengths, or the prefix of an .idx"


def read_documents(text: str, tokens: int) -> tuple[Documents, np.ndarray]:
    """The documents of `--documents`, end to end in a sequence of `tokens`, and their lengths there.

    Listed lengths may leave padding. Of drawn documents, and of those of a file, the last is cut.

    Raises:
        UsageError: no such lengths or file, or listed lengths that are longer than the sequence.
    """
    if found := re.fullmatch(r"lognormal:([\d.]+),([\d.]+)", text):
        lengths = _drawn(text, found[1], found[2], tokens)
    elif re.fullmatch(f"{LENGTH}(,{LENGTH})*", text):
        lengths = _listed(text, tokens)
    else:
        lengths = _of_file(text)
    if not len(lengths) or lengths.min() < 1:
        raise UsageError(f"--documents {text}: a document has 1 token or more; {GOOD}")
    documents = end_to_end(lengths, tokens)
    return documents, np.diff(documents.edges[0])[documents.inside[0]]


def end_to_end(lengths: np.ndarray, tokens: int) -> Documents:
    """Documents of int64 lengths in one sample of `tokens`. What does not fit is cut off; what is left is padding."""
    ends = np.minimum(np.minimum(lengths, tokens).cumsum(), tokens)
    return Documents.packed(torch.from_numpy(np.unique(np.append(0, ends))), tokens)


def draw_lengths(median: float, sigma: float, tokens: int, generator: np.random.Generator) -> np.ndarray:
    """Log-normal lengths of documents, int64, until they fill `tokens`."""
    lengths = np.array([], np.int64)
    while lengths.sum() < tokens:
        more = generator.lognormal(np.log(median), sigma, 4096)
        lengths = np.append(lengths, more.clip(1, tokens).astype(np.int64))
    return lengths


def _listed(text: str, tokens: int) -> np.ndarray:
    lengths, counts = list[int](), list[int]()
    for part in text.split(","):
        length, _, count = part.partition("x")
        lengths.append(int(length))
        counts.append(int(count or 1))
    total = sum(length * count for length, count in zip(lengths, counts, strict=True))
    if total > tokens:
        raise UsageError(f"--documents {text}: {total} tokens; give --seq-length {total} or more")
    return np.repeat(np.array(lengths, np.int64), counts)


def _drawn(text: str, median: str, sigma: str, tokens: int) -> np.ndarray:
    try:
        middle, width = float(median), float(sigma)
    except ValueError:
        middle, width = 0.0, 0.0
    if middle < 1 or width > 10:
        raise UsageError(f"--documents {text}: need a median from 1 and a sigma to 10, such as lognormal:1100,1.5")
    return draw_lengths(middle, width, tokens, np.random.default_rng(SEED))


def _of_file(text: str) -> np.ndarray:
    try:
        if Path(text + ".idx").is_file():
            from megatron.context_parallel.trainer.data.index_file import open_tokens

            lengths = np.array(open_tokens(text).lengths, np.int64)
            return lengths[lengths > 0]
        return np.array(Path(text).read_text().split(), np.int64)
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(f"--documents {text}: {_reason(error)}; {GOOD}") from None


def _reason(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def loads_by_layout(documents: Documents, n: int, costs: Costs, causal: bool) -> dict[str, ChunkLoads]:
    """The loads of n ranks in each layout, and in the placement of the solver, which is the last."""
    mask = Mask(causal, documents=documents)
    tokens = documents.shape[1]
    loads = {layout: chunk_loads(mask, Chunks.of(layout, n, tokens)) for layout in LAYOUTS}
    loads[PLACED] = chunk_loads(mask, place(documents, n, costs, causal))
    return loads


def documents_table(loads: dict[str, ChunkLoads], lengths: np.ndarray, tokens: int, costs: Costs, timed: bool) -> Table:
    """The table of `loads_by_layout`. `timed`: costs are those of a cluster."""
    title = f"{len(lengths)} documents of {lengths.min()} to {lengths.max()} tokens"
    caption = "work: visible pairs of the busiest rank, of the mean.\n"
    caption += "received: keys of other ranks that a rank sees, of all keys: the most, and the mean."
    if timed:
        caption += "\nbetween nodes: the most of them that come from other nodes.\n"
        caption += "ms: of both passes on the slowest rank at least: its pairs, or its links if they take longer."
    table = Table("tokens", title=title, caption=caption)
    for heading in ("work", "received", "mean", *(["between nodes", "ms"] if timed else [])):
        table.add_column(heading, justify="right")
    for name, of_ranks in loads.items():
        between = of_ranks.rows - of_ranks.inside(costs.ranks_per_node)
        table.add_row(
            name,
            f"{of_ranks.pairs.max() / of_ranks.pairs.mean():.2f}",
            f"{of_ranks.rows.sum(1).max() / tokens:.3f}",
            f"{of_ranks.rows.sum(1).mean() / tokens:.3f}",
            *([f"{between.sum(1).max() / tokens:.3f}", f"{costs.seconds(of_ranks).max() * 1e3:.4g}"] if timed else []),
        )
    return table
