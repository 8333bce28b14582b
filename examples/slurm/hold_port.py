"""Prints a free port of this host, and reserves it until the parent process ends.

The launcher of the ranks can still listen there: it sets SO_REUSEADDR, and this socket does not listen.
"""

import os
import socket
import time

starter = os.getppid()
family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
held = socket.socket(family)
if family == socket.AF_INET6:
    held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
held.bind(("", 0))
held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after bind: no other process gets the same port
print(held.getsockname()[1], flush=True)
nowhere = os.open(os.devnull, os.O_RDWR)
for stream in range(3):
    os.dup2(nowhere, stream)
while os.getppid() == starter:
    time.sleep(1)
