"""The traffic of a rank's network interfaces."""

from pathlib import Path
from typing import NamedTuple

SHAPED, INNER = "shaped", "inner"  # network interfaces inside a namespace


class Bytes(NamedTuple):
    received: int
    sent: int


def interface_bytes() -> dict[str, Bytes]:
    """Called in a rank: bytes that its network interfaces carried so far, with all headers.

    `shaped` is the NIC; the ranks of a node that share it read the same counter. `inner`, with one NIC per rank, leads
    to the other ranks of the node. Empty on plain loopback. Read it before a barrier, do the work, and read it after
    another: a rank leaves a barrier while others are still in it. Source: /proc/self/net/dev.
    """
    lines = (line.split() for line in Path("/proc/self/net/dev").read_text().replace(":", " ").splitlines())
    return {words[0]: Bytes(int(words[1]), int(words[9])) for words in lines if words[0] in (SHAPED, INNER)}
