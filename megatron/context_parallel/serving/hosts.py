"""The host names that a server answers to.

A web page can make its own name resolve to 127.0.0.1 (DNS rebinding), and then use a server that only this machine can
reach. The browser still sends the name of the page. Addresses cannot be abused in this way.
"""

import os
import socket
from collections.abc import Collection
from ipaddress import ip_address

from .protocol import Refused


def names_of(listens_at: str, allowed: Collection[str]) -> frozenset[str]:
    """Names of the server, besides all addresses: this machine's, the one it listens on, and those in `allowed`."""
    this_machine = socket.gethostname(), os.environ.get("SLURMD_NODENAME", "localhost")
    return frozenset(name.lower() for name in ("localhost", *this_machine, listens_at, *allowed))


def check_host(header: str, names: Collection[str]) -> None:
    """Reject a request for another host. A request without a host is not from a browser.

    Raises:
        Refused: the header `Host` contains another name.
    """
    name = _without_port(header.strip()).lower().removesuffix(".")
    if name and "*" not in names and name not in names and not _is_address(name):
        shown = name[:100]
        raise Refused(403, f"Host {shown!r}: not a name of this server; start it with --allowed-hosts {shown!r}")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
