"""From a command line to complete and checked arguments.

In: the command line, a YAML file, a preset, or the flags saved in a checkpoint. Out: `Arguments`, or one line that says
what to change. Start with `complete.py`; the `check_*.py` files refuse what does not fit together.
"""
