"""The plan language and its readers.

In: the steps that a strategy yields for each rank. Out: a verified plan, its communication volume, its memory, and the
time at which everything in it happens. Nothing here imports torch.distributed or a kernel.
Start with `ir.py` (the language), then `machine.py` (what a plan means) and `verify.py` (what is checked).
"""
