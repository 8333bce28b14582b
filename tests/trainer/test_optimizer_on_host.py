"""`--optimizer-cpu-offload`: the same run as with the optimizer on the device, which checkpoints do not tell apart."""

import pytest

from tests.support import weights_on_device


def test_an_optimizer_in_host_memory_trains_and_resumes_as_one_on_the_device(ranks, tmp_path):
    (losses, norms), *runs = ranks(2, weights_on_device.relays, str(tmp_path))[0]
    for run in runs:
        last = len(run[0])
        assert run[0] == pytest.approx(losses[-last:], rel=1e-4)  # the host's Adam rounds another way
        assert run[1] == pytest.approx(norms[-last:], rel=1e-4)
