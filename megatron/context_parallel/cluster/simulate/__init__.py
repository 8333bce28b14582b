"""The time of one pass of a plan on a described cluster.

In: a plan, a mask, sizes and a `Cluster`. Out: when each block and each message runs, and the total.
Start with `one_pass.py`; `block_time.py` has the cost of a block, `seen_shares.py` what it sees of the pairs of
rows, `links.py` says which links a message shares.
"""
