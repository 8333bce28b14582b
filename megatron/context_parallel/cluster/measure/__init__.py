"""Measures the cluster that the ranks are on.

In: a process group. Out: a `Cluster` with the rates of its devices and links.
Start with `probe.py`; `probe_device.py` measures computation, `probe_links.py` measures communication.
"""
