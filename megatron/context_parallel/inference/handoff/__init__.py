"""Hands prefilled sequences to decoders of another program: each rank serves the rows that it has.

In: sequences that the engine prefills, pinned under a lease. Out: their keys and values over TCP.
Start with `sequences.py` (what a rank has to give), then `rows_port.py` (the thread that gives it) and `leases.py` (how
long). The protocol is in `integration/vllm/wire.py`.
"""
