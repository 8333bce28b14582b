"""The commands: each module has `main(argv=None)`; `programs.py` defines their console scripts."""
