"""The commands: each module has `main(argv=None)`; `programs.py` defines their console scripts.

`python -m megatron.context_parallel.commands.NAME` runs the console script of a module.
"""
