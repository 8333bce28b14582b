"""Flags, tables and the start and end of every program.

In: declarations of flags and a command line. Out: checked values, or one line that says what to change.
Start with `flag.py` (how a flag is declared), then `flag_parser.py`.
"""
