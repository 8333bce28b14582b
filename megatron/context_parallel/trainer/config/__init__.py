"""The flags of the trainer, each declared once, and presets of published models.

Out: the fields of `Arguments`, with names, types, defaults and the rules between them.
Start with `flags.py`; `upstream_flags.py` lists Megatron's flags that have no effect or another name here.
"""
