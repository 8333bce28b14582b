"""Runs a plan on a rank.

In: a plan, this rank's tensors, a kernel and a transport. Out: output and log-sum-exp, or gradients. The same code
runs over torch.distributed and with all ranks in one process.
Start with `executor.py`, then `passes.py` (head swaps around a plan); `blocks.py` cuts blocks for the kernels.
"""
