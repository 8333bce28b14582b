"""Loads a model for generation, from a checkpoint or a HuggingFace folder.

In: flags (`flags.py`). Out: an engine of `inference/` with weights and a tokenizer.
Start with `generator.py`, then `load_model.py`.
"""
