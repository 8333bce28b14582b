"""The plan language and its readers.

In: the steps that a strategy yields for each rank. Out: a verified plan, its communication volume, its memory, and a
trace with the time of each block and message. Nothing here imports torch.distributed or a kernel.
Start with `ir.py` (the language), then `machine.py` (what a plan means) and `verify.py` (what is checked).
"""
