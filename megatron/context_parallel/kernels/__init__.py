"""Attention of one block, forward and backward.

In: queries, keys and values of one block, and which keys each query sees. Out: a partial output with its log-sum-exp,
or gradients. `interface.py` says what a kernel is to its users, `choose.py` which one serves a tensor, `masks.py` how a
block is cut into pieces that flash kernels compute, `merge.py` how partials merge. Start with `interface.py`.
"""
