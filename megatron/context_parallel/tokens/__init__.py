"""Which rank holds which tokens, and which tokens see each other.

In: the length of a sequence, a layout, a mask, a grid of ranks. Out: positions of each chunk, pairs of chunks that see
each other, intervals of keys, a placement of documents. Nothing here computes attention or communicates.
Start with `layout.py` (chunks), then `documents.py` and `mask.py` (visibility), and `chunk_pairs.py` (what a plan needs
of a mask).
"""
