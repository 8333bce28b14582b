"""Sends chunks between ranks.

In: sends, receives and collectives of a step. Out: tensors, through torch.distributed or between ranks of one process.
Start with `transport.py`; `communicators.py` makes the groups, `flight_recorder.py` notes what a rank waits for.
"""
