"""Draws what documents load the ranks with, by layout and placed, for docs/documents.md."""

import hashlib
from functools import cache
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from megatron.context_parallel.commands.plan_documents import loads_by_layout, read_documents
from megatron.context_parallel.plan.pictures.loads import draw_loads
from megatron.context_parallel.tokens.chunk_loads import ChunkLoads
from megatron.context_parallel.tokens.place_documents import Costs

RANKS, TOKENS = 32, 2**19


@cache
def loads() -> dict[str, ChunkLoads]:
    documents, _ = read_documents("lognormal:1100,1.5", TOKENS)
    return loads_by_layout(documents, RANKS, Costs(1.0), causal=True)


def digest() -> str:
    shown = [of.pairs.tobytes() + of.rows.tobytes() for of in loads().values()]
    return hashlib.sha256(b"".join(shown)).hexdigest()[:16]


def draw_documents(path: Path) -> None:
    draw_loads(loads(), TOKENS, path)
    described = PngInfo()
    described.add_text("Description", digest())
    with Image.open(path) as image:
        image.save(path, pnginfo=described)
