"""Messages between the ranks of one host over Unix sockets."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.context_parallel.runtime.comm import host_sockets
from megatron.context_parallel.runtime.comm.host_sockets import Exchange, HostSockets

LONG = 1 << 19  # more bytes than a socket stores


def _messages() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(n) if other != rank]
    sockets = HostSockets.connect(dist.group.WORLD)
    assert sorted(sockets.links) == others
    for dtype, length in ((torch.float64, LONG), (torch.bfloat16, 3), (torch.int64, 0)):
        mine = torch.full((length, 2), rank + 1, dtype=dtype)
        found = {other: torch.zeros_like(mine) for other in others}
        exchange = Exchange(sockets, dict.fromkeys(others, mine), found)
        for factor in (1, 10):  # the tensors of each time
            mine.fill_((rank + 1) * factor)
            exchange.wait()
            assert all((x == (other + 1) * factor).all() for other, x in found.items())
    told = torch.tensor([7 if rank == 0 else 0])
    one_way = (dict.fromkeys(others, told), {}) if rank == 0 else ({}, {0: told})
    Exchange(sockets, *one_way).wait()
    assert told.item() == 7
    sockets = HostSockets(sockets.links, 0.01)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"not answered for 0\.01 s"):
            Exchange(sockets, {}, {1: told}).wait()
    dist.barrier()
    sockets = HostSockets(sockets.links, 60)
    if rank == 1:
        for link in sockets.links.values():
            link.close()
    else:
        with pytest.raises(RuntimeError, match="a rank of this host has ended: "):
            Exchange(sockets, {1: told}, {1: told}).wait()
    with mock.patch.object(host_sockets, "_host", lambda: f"host {rank // 2}"):
        assert HostSockets.connect(dist.group.WORLD) is None
    with mock.patch.object(host_sockets, "_host", lambda: ""):  # not Linux
        assert HostSockets.connect(dist.group.WORLD) is None


def test_messages_of_one_host(ranks):
    ranks(3, _messages)
