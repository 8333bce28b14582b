"""The bytes that ranks of one process send to each other."""

from collections import Counter

import pytest

from megatron.context_parallel.runtime.comm.transport import LocalTransport


def count_received(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """The bytes that each rank is sent from now on, by rank."""
    received: Counter = Counter()
    exchange = LocalTransport.exchange

    def counted(self, channel, sends, receives):
        for peer, x in sends:
            received[peer] += x.numel() * x.element_size()
        return exchange(self, channel, sends, receives)

    monkeypatch.setattr(LocalTransport, "exchange", counted)
    return received
