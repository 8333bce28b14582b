"""The predicted memory of a step against the allocator's peak in a real one."""

import pytest
from megatron.core import parallel_state

from benchmarks import memory, memory_rank
from megatron.context_parallel.cluster.step.memory import peak
from megatron.context_parallel.cluster.step.moment import ATTENTION, MLP, OUTPUT, Moment
from megatron.context_parallel.trainer import setup
from megatron.context_parallel.trainer.arguments.complete import parse_args
from megatron.context_parallel.trainer.config.workload import model_of, run_of

RING = f"{memory.sizes(2, 64, 64, 8, 64, 512, 256)} {memory.LLAMA} {memory.FULL} --context-parallel-size 2"
ROUNDS = f"{memory.sizes(2, 64, 64, 16, 64, 512, 256)} {memory.LLAMA} {memory.FULL} --context-parallel-size 2 "
ROUNDS += "--cp-strategy ulysses --cp-head-rounds 4"
WIDE = f"{memory.sizes(3, 64, 512, 4, 16, 256, 128)} {memory.LLAMA} --bf16"
HEAD_OF_GPT = f"{memory.sizes(2, 32, 64, 4, 8, 256, 4096)} --cross-entropy-chunk-size 256"


def of_a_step(flags: str) -> tuple[Moment, int]:
    """The predicted moment, and the allocator's peak."""
    args = parse_args([*memory.COMMON.split(), *flags.split()])
    setup.initialize_model_parallel(args)
    try:
        return peak(model_of(args), run_of(args)), memory_rank.allocated(args)
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(
    ("ranks_of_a_sequence", "flags", "name"),
    [(2, RING, ATTENTION), (2, ROUNDS, ATTENTION), (1, WIDE, MLP), (1, HEAD_OF_GPT, OUTPUT)],
)
def test_the_peak_is_that_of_the_allocator(ranks, ranks_of_a_sequence, flags, name):
    for moment, allocated in ranks(ranks_of_a_sequence, of_a_step, flags):
        assert moment.name == name
        assert moment.bytes == pytest.approx(allocated, rel=0.03)
