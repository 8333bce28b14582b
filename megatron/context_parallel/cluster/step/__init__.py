"""The time and the memory of a training iteration, of a prefill and of a decoding step on a described cluster.

In: the shape of a model (`model_shape.py`), how it is trained (`train_config.py`), a `Cluster`. Out: seconds by kind,
model FLOPs utilization, bytes. Start with `step_time.py`, then `stage_time.py` and `memory.py`.
"""
