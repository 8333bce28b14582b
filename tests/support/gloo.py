"""One thread for the sockets of all gloo groups of a process. Otherwise each group has one, which wakes every 10 ms."""

import os
from datetime import timedelta
from functools import cache

import torch.distributed as dist


@cache
def _device(process: int) -> dist.ProcessGroupGloo.Device:
    return dist.ProcessGroupGloo.create_default_device()


def share_a_thread() -> None:
    """For all groups that this process and its forks make from now on."""
    begin = dist.ProcessGroupGloo.__init__

    def with_device(
        group: dist.ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: timedelta, **others: object
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._threads, options._timeout = [_device(os.getpid())], 2, timeout
        for name, value in others.items():  # torch 2.15 gives enable_reconfigure
            setattr(options, name, value)
        begin(group, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = with_device
