"""ring-flash-attn: ring attention in zigzag, striped or plain order, with flash-attn's functions replaced."""

import importlib
import sys
import types

from megatron.context_parallel.tokens.layout import positions

from . import cpu_flash

NAMES = {"zigzag": "zigzag_ring_flash_attn", "stripe": "stripe_flash_attn", "basic": "ring_flash_attn"}
LAYOUTS = {"zigzag": "zigzag", "stripe": "cyclic", "basic": "contiguous"}


class Adapter:
    order = "bshd"

    def __init__(self, problem, group, flash, variant="zigzag"):
        if variant not in LAYOUTS:
            raise ValueError(f"variant={variant}: choose one of {', '.join(LAYOUTS)}")
        cpu_flash.install(flash)
        # Its patches for Hugging Face models are of no use here, and importing transformers takes seconds.
        hugging_face = types.ModuleType("ring_flash_attn.adapters")
        hugging_face.substitute_hf_flash_attn = hugging_face.update_ring_flash_attn_params = None
        sys.modules.setdefault(hugging_face.__name__, hugging_face)
        name = NAMES[variant]
        module = importlib.import_module(f"ring_flash_attn.{name}")
        cpu_flash.copy_gradient_buffers(module)
        self.function = getattr(module, f"{name}_func")
        self.problem, self.group, self.layout = problem, group, LAYOUTS[variant]

    def positions(self, length):
        return positions(self.layout, self.group.rank(), self.problem.ranks, length)

    def attend(self, q, k, v):
        return self.function(q, k, v, causal=self.problem.causal, group=self.group)
