"""Attention of one block, forward and backward.

In: queries, keys and values of one block, and which keys each query sees. Out: a partial output with its log-sum-exp,
or gradients. `interface.py` defines a kernel, `choose.py` selects one, `masks.py` cuts a block into pieces that flash
kernels compute, `merge.py` merges partials. Start with `interface.py`.
"""
