"""Packs pieces of documents into samples: best fit, the longest first."""

from bisect import bisect_left, insort
from collections import defaultdict

import numpy


def best_fit(rows: numpy.ndarray, capacity: int) -> numpy.ndarray:
    """The sample of each piece, int64 [pieces], numbered from 0.

    The longest piece comes first, of equally long ones the first. Each goes into the sample with the least room that
    holds it, or else into a new one. This takes O(N log N) comparisons for N pieces.

    Args:
        rows: of each piece, 1 to `capacity`: integers [pieces].
        capacity: rows of a sample.
    """
    order = numpy.argsort(-rows, kind="stable")
    falling, counts = numpy.unique(-rows, return_counts=True)
    in_order = numpy.empty(len(rows), numpy.int64)  # the sample of each piece, longest first
    rooms: list[int] = []  # the rooms of samples that are not full, each once, ascending
    samples = defaultdict[int, list[int]](list)  # by room
    opened = 0
    packed = 0
    for size, left in zip((-falling).tolist(), counts.tolist(), strict=True):
        while left:
            at = bisect_left(rooms, size)
            if at == len(rooms):
                room, sample = capacity, opened
                opened += 1
            else:
                room = rooms[at]
                sample = samples[room].pop()
                if not samples[room]:
                    del rooms[at]
            taken = min(left, room // size)  # what is left of this room is the least that holds another of this size
            in_order[packed : packed + taken] = sample
            packed += taken
            left -= taken
            rest = room - taken * size
            if rest:
                if not samples[rest]:
                    insort(rooms, rest)
                samples[rest].append(sample)
    found = numpy.empty_like(in_order)
    found[order] = in_order
    return found
