"""Which strategy, or which way to train, is fastest on a described cluster.

In: a workload or a model, and a `Cluster`. Out: candidates in the order of their predicted time.
Start with `planner.py`; `candidates.py` lists what is tried, `lower_bound.py` skips what cannot win, and `auto.py` lets
the ranks of a group agree on one.
"""
