"""The time of everything but attention on a device: matrix products, norms, the loss, the optimizer."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy

from megatron.context_parallel.cluster.description import Device, GemmRate

from .model_shape import ModelShape
from .train_config import TrainConfig

OF_PEAK = 0.7  # of a device whose products were not measured
LOSS_READS = 9, 4  # float32 numbers that move for a logit, forward and backward


class Mlp(NamedTuple):
    """The MLPs of a rank that compute equally many tokens: how many, of which width, and the tokens of each."""

    number: int
    width: int
    tokens: float


class KernelTime(NamedTuple):
    """Seconds of products, seconds of other kernels, which move numbers, and how many kernels there are."""

    gemm: float
    moving: float
    kernels: int


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one micro batch on one rank, of what is not attention.

    Products run at the device's rate, other kernels at the speed of its memory.

    Attributes:
        slower: how many times longer all takes, where ranks share processors.
    """

    model: ModelShape
    run: TrainConfig
    device: Device
    slower: float = 1.0

    def layer(self, backward: bool) -> KernelTime:
        """A layer without its attention. The backward pass has two products for each one of the forward pass."""
        if not backward:
            return self.forward(*self.forward_parts)
        hidden, rotated, inner = self._widths
        numbers = 2 * 3 * hidden + 2 * 3 * hidden + rotated + (5 if self.model.swiglu else 3) * inner
        moved = self.forward(*({"dispatch"} & {*self.forward_parts}))
        kernels = 2 * sum(self._product_kernels.values()) + 6 + sum(mlp.number for mlp in self._mlps) + moved.kernels
        return KernelTime(2 * sum(self.products.values()), self._moving(numbers) + moved.moving, kernels)

    def forward(self, *names: str) -> KernelTime:
        """Some of the parts of a layer's forward pass."""
        parts = [self.forward_parts[name] for name in names]
        gemm = sum(part.gemm for part in parts)
        moving = sum(part.moving for part in parts)
        return KernelTime(gemm, moving, sum(part.kernels for part in parts))

    @property
    def forward_parts(self) -> dict[str, KernelTime]:
        """The forward pass of a layer without its attention, by part."""
        hidden, rotated, inner = self._widths
        kernels = self._product_kernels
        parts = {name: KernelTime(seconds, 0.0, kernels[name]) for name, seconds in self.products.items()}
        parts["norms"] = KernelTime(0.0, self._moving(2 * 2 * hidden), 2)
        parts["residual sums"] = KernelTime(0.0, self._moving(2 * 3 * hidden), 2)
        parts["RoPE"] = KernelTime(0.0, self._moving(rotated), 2)
        mlps = sum(mlp.number for mlp in self._mlps)
        parts["activation"] = KernelTime(0.0, self._moving((3 if self.model.swiglu else 2) * inner), mlps)
        if self.model.num_experts:  # tokens are sorted by expert and back, each time a read and a write
            parts["dispatch"] = KernelTime(0.0, self._moving(2 * 2 * self.model.moe_router_topk * hidden), 2)
        return parts

    @property
    def _widths(self) -> tuple[float, float, float]:
        """Numbers of a token on a rank: hidden states, what RoPE reads and writes, the MLP's inner numbers."""
        model, tensor = self.model, self.run.tensor_model_parallel_size
        hidden = model.hidden_size / (tensor if self.run.sequence_parallel else 1)
        rotated = 0 if model.positions else 2 * (model.queries + model.keys) / tensor
        return hidden, rotated, model.mlp_width / tensor

    @property
    def _mlps(self) -> list[Mlp]:
        """The MLPs of a layer on a rank. Experts are equally busy: each computes as many tokens."""
        model, tokens = self.model, self.run.tokens
        if not model.num_experts:
            return [Mlp(1, model.ffn_hidden_size, tokens)]
        over = model.expert_model_parallel_size
        chosen = tokens * over * model.moe_router_topk / model.num_experts
        experts = Mlp(model.num_experts // over, model.moe_ffn_hidden_size or 0, chosen)
        shared = model.moe_shared_expert_intermediate_size
        return [experts, Mlp(1, shared, tokens)] if shared else [experts]

    @property
    def _product_kernels(self) -> dict[str, int]:
        mlps = sum(mlp.number for mlp in self._mlps)
        router = {"router": 1} if self.model.num_experts else {}
        return {"qkv": 1, "proj": 1, **router, "fc1": mlps, "fc2": mlps}

    @property
    def products(self) -> dict[str, float]:
        """Seconds of the products of a layer's forward pass."""
        h, tensor = self.model.hidden_size, self.run.tensor_model_parallel_size
        queries, gates = self.model.queries // tensor, 2 if self.model.swiglu else 1
        parts = {
            "qkv": self.product(h, queries + 2 * max(self.model.kv_channels, self.model.keys // tensor)),
            "proj": self.product(queries, h),
        }
        if self.model.num_experts:
            parts["router"] = self.product(h, self.model.num_experts)
        parts["fc1"] = sum(mlp.number * self.product(h, gates * mlp.width // tensor, mlp.tokens) for mlp in self._mlps)
        parts["fc2"] = sum(mlp.number * self.product(mlp.width // tensor, h, mlp.tokens) for mlp in self._mlps)
        return parts

    def product(self, k: int, n: int, tokens: float | None = None) -> float:
        """Seconds of [tokens, k] by [k, n]: at the rate for its size, or as fast as memory allows.

        By default they are the tokens of the rank.
        """
        m = tokens or self.run.tokens
        rates = self.device.gemm or (GemmRate(size=1, TFLOP_s=OF_PEAK * self.device.peak_TFLOP_s),)
        dtype = min((rate.dtype for rate in rates), key=lambda dtype: dtype != self.run.dtype)
        sizes, speeds = zip(*sorted((math.log(r.size), r.TFLOP_s) for r in rates if r.dtype == dtype), strict=True)
        speed = 1e12 * float(numpy.interp(math.log(m * k * n) / 3, sizes, speeds))
        computing = 2 * m * k * n / speed * self.slower
        moving = self._seconds(self.run.itemsize * (m * k + k * n + m * n))
        return max(computing, moving)

    def embedding(self, backward: bool) -> KernelTime:
        """The first stage's embedding: rows are read and written, and in the backward pass added."""
        return KernelTime(0.0, self._moving((3 if backward else 2) * self.model.hidden_size), 1)

    def logits(self, backward: bool) -> KernelTime:
        """The last stage's norm, logits and loss."""
        logits = self.model.padded_vocab_size // self.run.tensor_model_parallel_size
        passes = 4 * LOSS_READS[backward] + self.run.itemsize
        moving = self._moving(2 * self.model.hidden_size) + self._seconds(passes * logits * self.run.tokens)
        chunks = math.ceil(self.run.tokens / self.run.tokens_of_loss)
        if backward:  # each chunk but the first adds its gradient of the output layer: two reads and a write
            moving += self._seconds(3 * 4 * (chunks - 1) * logits * self.model.hidden_size)
        product = self.product(self.model.hidden_size, logits)
        return KernelTime(product * (2 if backward else 1), moving, 8 if backward else 12)

    def optimizer(self, parameters: int) -> float:
        """Adam for the parameters of a rank's part: norm and clipping of gradients, moments, weights."""
        copies = 2 if self.run.itemsize == 2 else 0  # 16-bit weights are written beside their float32 copies
        return self._seconds((4 + 8 + 4 + 16 + 8 + copies) * parameters)

    def _moving(self, numbers: float) -> float:
        return self._seconds(numbers * self.run.itemsize * self.run.tokens)

    def _seconds(self, size: float) -> float:
        return size / (self.device.memory_GB_s * 1e9) * self.slower
