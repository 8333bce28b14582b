"""From a command line to complete and checked arguments.

In: the command line, a YAML file, a preset, or the flags saved in a checkpoint. Out: `Arguments`, or a one-line error
with a remedy. Start with `complete.py`. The `check_*.py` files reject invalid combinations.
"""
