"""What a job does when a rank, its data or its numbers go wrong.

In: where each rank is, and what it finds. Out: one line that names the cause, and an end of all ranks.
Start with `watch.py` (a thread of each rank), then `judge.py` (who broke the job).
"""
