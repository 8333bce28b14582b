"""DeepSpeed Ulysses (`DistributedAttention`) around the CPU kernel."""

import importlib
import math
import os

from megatron.context_parallel.tokens.layout import positions

from .cpu_flash import FlashAttention


class Adapter:
    order = "sbhd"

    def __init__(self, problem, group, flash):
        os.environ["DS_ACCELERATOR"] = "cpu"  # or it warns that it looked for others
        operators = importlib.import_module("deepspeed.ops")
        # Compiled when communication starts (40 s), for reductions inside a machine, which are not used here.
        operators.__compatible_ops__["deepspeed_shm_comm"] = False
        importlib.import_module("deepspeed.comm").init_distributed(
            "gloo", auto_mpi_discovery=False, dist_init_required=False, verbose=False
        )
        layer = importlib.import_module("deepspeed.sequence.layer")
        scale = 1 / math.sqrt(problem.head_dim)

        def local(q, k, v):
            rows = (x.transpose(0, 1) for x in (q, k, v))
            return FlashAttention.apply(*rows, scale, problem.causal, flash).transpose(0, 1)

        self.problem, self.group = problem, group
        self.attention = layer.DistributedAttention(local, group)

    def positions(self, length):
        return positions("contiguous", self.group.rank(), self.problem.ranks, length)

    def attend(self, q, k, v):
        return self.attention(q, k, v, 1)
