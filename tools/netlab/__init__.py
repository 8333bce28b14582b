"""A cluster in a box; see docs/netlab.md."""

from .devices import Busy, add_device_flags, with_devices
from .flags import Cluster, add_flags, cluster_of
from .lab import Lab
from .launch import Loopback, exits_as_ranks_did, free_port
from .traffic import interface_bytes

__all__ = [
    "Busy",
    "Cluster",
    "Lab",
    "Loopback",
    "add_device_flags",
    "add_flags",
    "cluster_of",
    "exits_as_ranks_did",
    "free_port",
    "interface_bytes",
    "with_devices",
]
