"""megatron-core's model, optimizer and schedule.

In: `Arguments` and context groups. Out: model chunks wrapped for data parallelism. Start with `build.py`, then
`data_parallel.py` (how gradients are summed and weights are sharded).
"""
