"""yunchang: USP, the exchange of heads around a zigzag ring, with flash-attn's functions replaced."""

import importlib
import math

from megatron.context_parallel.tokens.layout import positions

from . import cpu_flash


class Adapter:
    order = "bshd"

    def __init__(self, problem, group, flash, ulysses=None):
        ulysses = ulysses or math.gcd(problem.ranks, problem.kv_heads)
        if problem.ranks % ulysses:
            raise ValueError(f"ulysses={ulysses}: does not divide {problem.ranks} ranks")
        cpu_flash.install(flash)
        self.rank = group.rank()
        library = importlib.import_module("yunchang")
        self.ulysses, self.ring, self.causal = ulysses, problem.ranks // ulysses, problem.causal
        library.set_seq_parallel_pg(ulysses, self.ring, self.rank, problem.ranks)
        if self.ring == 1:
            self.attention = library.UlyssesAttention(group)
            return
        variant = "zigzag" if problem.causal else "basic"
        name = "zigzag_ring_flash_attn" if problem.causal else "ring_flash_attn"
        cpu_flash.copy_gradient_buffers(importlib.import_module(f"yunchang.ring.{name}"))
        self.attention = library.LongContextAttention(ring_impl_type=variant)

    def positions(self, length):
        layout = "zigzag" if self.causal else "contiguous"
        place, head_place = divmod(self.rank, self.ulysses)  # ranks that share tokens are neighbours
        return positions(layout, place, self.ring, length).chunk(self.ulysses)[head_place]

    def attend(self, q, k, v):
        return self.attention(q, k, v, causal=self.causal)
