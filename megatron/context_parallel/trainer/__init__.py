"""The trainer: from flags to a trained checkpoint.

In: a command line. Out: losses, logs and checkpoints. The folders, from the lowest layer: `config/` declares the flags,
`data/` and `model/` build from them, `faults/` watches the ranks, `checkpoint/` saves and loads, `arguments/` completes
and checks the flags. Start with `training.py`, the loop.
"""
