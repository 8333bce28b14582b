"""Flags, tables and the start and end of every program.

In: declarations of flags and a command line. Out: checked values, or a one-line error with a remedy.
Start with `flag.py` (how a flag is declared), then `flag_parser.py`.
"""
