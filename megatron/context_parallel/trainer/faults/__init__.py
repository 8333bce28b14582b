"""Handles failures of ranks, bad data, and values that are not finite.

In: the position and the findings of each rank. Out: one line that names the cause, and the end of all ranks.
Start with `watch.py` (a thread of each rank), then `judge.py` (which rank broke the job).
"""
