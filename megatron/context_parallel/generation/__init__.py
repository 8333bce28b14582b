"""A model to generate with, from a checkpoint or a folder of HuggingFace.

In: flags (`flags.py`). Out: an engine of `inference/` with weights and a tokenizer.
Start with `generator.py`, then `load_model.py`.
"""
