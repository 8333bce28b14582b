"""Converts weights between HuggingFace and the trainer's checkpoints, one weight in memory at a time.

In: a HuggingFace folder, or a checkpoint. Out: the other. Start with `to_megatron.py`.
"""
