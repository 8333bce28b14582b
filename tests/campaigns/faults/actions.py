"""What a fault does, in the process of its victim."""

import ctypes
import gc
import os
import resource
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from torch import Tensor

from megatron.context_parallel.trainer.faults.watch import Watch

from . import moments

SPOILT = "decoder.layers.0.mlp.linear_fc1.weight"
BALLAST = "ballast"
_SO_ATTACH_FILTER = 26
_CLONE_NEWNS = 0x20000


def kill() -> None:
    """As an out-of-memory killer or a failed node ends a rank."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """As on a frozen host: the process exists but does nothing."""
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
    """As with a broken network: every TCP connection of the rank is closed, and the rank continues."""
    for connection in _tcp_sockets():
        with suppress(OSError):  # one that listens has no peer
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()


def go_silent() -> None:
    """As a network that loses every packet: nothing reaches the rank, no acknowledgement either."""
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a filter: return 0 bytes of each
    program = struct.pack("HP", 1, ctypes.addressof(nothing))
    for connection in _tcp_sockets():
        connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
        connection.close()


def drop_watch() -> None:
    (watch,) = [found for found in gc.get_objects() if type(found) is Watch]
    for connection in list(watch._monitors.values()):
        connection.socket.shutdown(socket.SHUT_RDWR)


def _tcp_sockets() -> Iterator[socket.socket]:
    """Those of this process, each as a copy to close."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # no socket, or closed by now: the list has its own descriptor
            found = socket.socket(fileno=os.dup(descriptor))
            if found.family in (socket.AF_INET, socket.AF_INET6):
                yield found


def fail() -> None:
    """A bug, or a device that reports an error."""
    raise RuntimeError("injected")


def fail_with(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def nan_gradient() -> None:
    """A NaN in one gradient of this rank, before gradients are reduced."""
    moments.current.state.model[0].module.get_parameter(SPOILT).register_hook(lambda gradient: gradient * float("nan"))


def bad_token(token: int) -> None:
    """A damaged batch: one token of the next sample is `token`."""

    def spoil(sample: dict[str, Tensor]) -> dict[str, Tensor]:
        tokens, labels = sample["tokens"].clone(), sample["labels"].clone()
        tokens[5] = labels[4] = token
        return sample | {"tokens": tokens, "labels": labels}

    moments.current.spoil = spoil


def fill_disk(directory: Path) -> None:
    """Fills the file system of `directory`."""
    with suppress(OSError), open(directory / BALLAST, "wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(1 << 12))


def move_away(directory: Path) -> None:
    directory.rename(f"{directory}.gone")


def make_read_only(directory: Path) -> None:
    """Mounts over the directory, because permissions do not stop root. Open files stay writable."""
    subprocess.run(["mount", "--bind", str(directory), str(directory)], check=True)
    remount = ["mount", "-o", "remount,bind,ro", str(directory)]
    for _ in range(500):  # it is busy while another rank writes a file that it opened since
        if subprocess.run(remount, stderr=subprocess.DEVNULL).returncode == 0:
            return
        time.sleep(0.01)
    subprocess.run(remount, check=True)


def kill_helpers() -> None:
    """Kills the data loader's workers of the rank, as the out-of-memory killer does."""
    for helper in psutil.Process().children():
        helper.kill()


def few_files(most: int) -> None:
    """As `ulimit -n` sets it."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def small_shared_memory(kilobytes: int) -> None:
    """/dev/shm is this small for the rank, which gets mounts of its own."""
    ctypes.CDLL(None).unshare(_CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", "/dev/shm"], check=True)
