"""A trial of benchmarks/longest.py: whether a step fits a limit of memory.

python -m pytest tests/campaigns/longest.py
"""

from benchmarks import longest, memory


def test_a_sequence_that_is_too_long_lacks_memory(monkeypatch):
    """9 MiB of logits fit the limit, and 300 do not."""
    for name in (*memory.MMAP, "OMP_NUM_THREADS", "PYTHONWARNINGS", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # put back what the benchmark changes
    flags = [*longest.COMMON.split(), *longest.CASES["full recomputation"].split()]
    context = longest.fork_server()
    assert longest.trains_with(flags, 1024, context)
    assert not longest.trains_with(flags, 16384, context)
