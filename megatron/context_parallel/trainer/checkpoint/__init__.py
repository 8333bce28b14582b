"""Saves and loads checkpoints so that an interruption loses nothing.

In: the state of a run. Out: complete checkpoints with checksums, or the state restored on another parallel layout.
Start with `save_load.py`, then `store.py` (a directory of checkpoints) and `train_state.py` (what is in one).
"""
