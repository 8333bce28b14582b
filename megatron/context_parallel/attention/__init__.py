"""The public attention function and the context group.

In: q, k, v of this rank and a `ContextParallel`. Out: the exact attention output, with gradients.
Start with `api.py` (context_parallel_attention), then `context.py` (a group, and how its ranks run a plan), `plans.py`
and `torch_op.py` (attention as a PyTorch operator).
"""
