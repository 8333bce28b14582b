"""What a fault does, in the process of its victim."""

import os
import signal
import socket
import time
from collections.abc import Callable


def kill() -> None:
    """As an out-of-memory killer or a failed node ends a rank."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """As a frozen host: the process is there and does nothing."""
    os.kill(os.getpid(), signal.SIGSTOP)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt_all() -> None:
    """Ctrl-C: the signal goes to every rank."""
    os.killpg(os.getpgrp(), signal.SIGINT)


def kill_launcher() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1)  # the signal that this sends to its children, if they asked for one, is on its way


def cut_off() -> None:
    """As a broken network: every TCP connection of the rank is closed, and the rank goes on."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            connection = socket.socket(fileno=os.dup(descriptor))
        except OSError:  # no socket, or closed by now: the list has its own descriptor
            continue
        try:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # one that listens
            pass
        connection.close()


def fail() -> None:
    """A bug, or a device that reports an error."""
    raise RuntimeError("injected")


def fail_with(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action
