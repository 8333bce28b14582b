"""`--optimizer-cpu-offload`: the same run as with the optimizer on the device, which checkpoints do not tell apart."""

import pytest

from tests.support import shards_on_host, weights_on_device, zero_case


def test_an_optimizer_in_host_memory_trains_and_resumes_as_one_on_the_device(ranks, tmp_path):
    (losses, norms), *runs = ranks(2, weights_on_device.relays, str(tmp_path))[0]
    for run in runs:
        last = len(run[0])
        assert run[0] == pytest.approx(losses[-last:], rel=1e-4)  # the host's Adam rounds another way
        assert run[1] == pytest.approx(norms[-last:], rel=1e-4)


def test_shards_in_host_memory_train_and_resume_as_those_on_the_device(ranks, tmp_path):
    """A tied embedding, and weights whose rows are unevenly sharded."""
    saves = {"train_iters": 3, "save_interval": 1, "save": str(tmp_path), "hidden_size": 36, "kv_channels": 9}
    losses, norms = ranks(2, zero_case.train, "gpt3", zero_case.WAYS["torch_fsdp2"] | saves)[0]
    loads = saves | {"load": str(tmp_path), "ckpt_step": 1}
    found = ranks(2, shards_on_host.train, loads)[0]
    assert found[0] == pytest.approx(losses[1:], rel=1e-6)
    assert found[1] == pytest.approx(norms[1:], rel=1e-6)
    assert found[2]
