"""Weights between HuggingFace and the trainer's checkpoints, one weight in memory at a time.

In: a folder of HuggingFace, or a checkpoint. Out: the other. Start with `to_megatron.py`.
"""
