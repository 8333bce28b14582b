"""What a person runs: each module has `main(argv=None)`; `programs.py` makes console scripts of them."""
