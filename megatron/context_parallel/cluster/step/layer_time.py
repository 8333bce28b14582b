"""The time of everything but attention on a device: matrix products, norms, the loss, the optimizer."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy

from megatron.context_parallel.cluster.description import Device, GemmRate
from megatron.context_parallel.errors import UsageError

from .model_shape import ModelShape
from .train_config import TrainConfig

OF_PEAK = 0.7  # of a device whose products were not measured
LOSS_READS = 9, 4  # float32 numbers that move for a logit, forward and backward
CAST = 2 + 2 * 1  # bytes of a number cast to FP8: it is read, and written as it is and transposed
TRANSPOSE = 1 + 1  # bytes of a number that is in FP8 already
# Transformer Engine's FP8 products of the backward pass add up in float32 (`_2X_ACC_DGRAD`, `_2X_ACC_WGRAD`), those of
# the forward pass do not. That takes 1.1 to 1.2 times as long (github.com/pytorch/ao/issues/2377).
FLOAT32_SUMS = 1.15


class Traffic(NamedTuple):
    """Numbers of a token that a layer's kernels move, forward and backward, for each number of its widths.

    Attributes:
        norms, sums: for the hidden size. The backward pass of both is in `hidden_back`.
        rope, rope_back: for the width of queries and keys together; splitting queries, keys and values included.
        gate, gate_back: for the width of a gated MLP.
    """

    norms: int
    sums: int
    rope: int
    gate: int
    hidden_back: int
    rope_back: int
    gate_back: int


FUSED = Traffic(norms=4, sums=6, rope=2, gate=3, hidden_back=12, rope_back=2, gate_back=5)
EAGER = Traffic(norms=14, sums=6, rope=13, gate=7, hidden_back=56, rope_back=16, gate_back=13)  # PyTorch's, on a CPU


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

    Raises:
        UsageError: products in FP8 on a device that has none.
    """

    model: ModelShape
    run: TrainConfig
    device: Device
    slower: float = 1.0

    def __post_init__(self) -> None:
        if self.run.fp8 and self.device.peak_fp8_TFLOP_s is None:
            name = self.device.name
            raise UsageError(f"--fp8-format {self.run.fp8}: {name} has no device.peak_fp8_TFLOP_s; leave it out")

    def layer(self, backward: bool) -> KernelTime:
        """A layer without its attention. The backward pass has two products for each one of the forward pass."""
        if not backward:
            return self.forward(*self.forward_parts)
        hidden, rotated, inner = self._widths
        traffic = self._traffic
        numbers = traffic.hidden_back * hidden + traffic.rope_back * rotated
        numbers += (traffic.gate_back if self.model.swiglu else 3) * inner
        moved = self.forward(*({"dispatch"} & {*self.forward_parts}))
        kernels = 2 * sum(self._product_kernels.values()) + 6 + sum(mlp.number for mlp in self._mlps) + moved.kernels
        kernels += len(self._cast_numbers(backward))
        moving = self._moving(numbers) + moved.moving + self._seconds(CAST * sum(self._cast_numbers(backward).values()))
        return KernelTime(2 * sum(self.backward_products.values()), moving, kernels)

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
        kernels, cast, traffic = self._product_kernels, self._cast_numbers(False), self._traffic
        parts = {
            name: KernelTime(seconds, self._seconds(CAST * cast.get(name, 0.0)), kernels[name] + (name in cast))
            for name, seconds in self.products.items()
        }
        parts["norms"] = KernelTime(0.0, self._moving(traffic.norms * hidden), 2)
        parts["residual sums"] = KernelTime(0.0, self._moving(traffic.sums * hidden), 2)
        parts["RoPE"] = KernelTime(0.0, self._moving(traffic.rope * rotated), 2)
        mlps = sum(mlp.number for mlp in self._mlps)
        parts["activation"] = KernelTime(0.0, self._moving((traffic.gate if self.model.swiglu else 2) * inner), mlps)
        if self.model.num_experts:  # tokens are sorted by expert and back, each time a read and a write
            parts["dispatch"] = KernelTime(0.0, self._moving(2 * 2 * self.model.moe_router_topk * hidden), 2)
        return parts

    @property
    def _traffic(self) -> Traffic:
        """Megatron-core's layers on a CPU are PyTorch's operations one by one. Its LayerNorm is one of them."""
        if not self.run.on_cpu:
            return FUSED
        return EAGER if self.model.normalization == "RMSNorm" else EAGER._replace(norms=4, hidden_back=12)

    @property
    def _widths(self) -> tuple[float, float, float]:
        """Numbers of a token on a rank: hidden states, what RoPE rotates, the MLP's inner numbers."""
        model, tensor = self.model, self.run.tensor_model_parallel_size
        hidden = model.hidden_size / (tensor if self.run.sequence_parallel else 1)
        rotated = 0 if model.positions else (model.queries + model.keys) / tensor
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
    def _sizes(self) -> dict[str, list[tuple[int, float, int, int]]]:
        """The products of a layer's forward pass that may be in FP8: number, tokens, width before and after."""
        h, tensor, tokens = self.model.hidden_size, self.run.tensor_model_parallel_size, self.run.tokens
        queries, gates = self.model.queries // tensor, 2 if self.model.swiglu else 1
        keys = max(self.model.kv_channels, self.model.keys // tensor)
        return {
            "qkv": [(1, tokens, h, queries + 2 * keys)],
            "proj": [(1, tokens, queries, h)],
            "fc1": [(mlp.number, mlp.tokens, h, gates * mlp.width // tensor) for mlp in self._mlps],
            "fc2": [(mlp.number, mlp.tokens, mlp.width // tensor, h) for mlp in self._mlps],
        }

    def _cast_numbers(self, backward: bool) -> dict[str, float]:
        """Numbers of a micro batch that are cast to FP8, by part: inputs, or backward gradients of outputs."""
        if not self.run.fp8:
            return {}
        numbers = dict[str, float]()
        for name, sizes in self._sizes.items():
            numbers[name] = sum(count * m * (n if backward else k) for count, m, k, n in sizes)
        return numbers

    def weight_casts(self, layers: int) -> float:
        """Weights are cast to FP8. Transformer Engine keeps them for all micro batches of an iteration."""
        if not self.run.fp8:
            return 0.0
        products = [product for sizes in self._sizes.values() for product in sizes]
        numbers = layers * sum(count * k * n for count, _, k, n in products)
        return self._seconds((TRANSPOSE if self.run.fp8_param_gather else CAST) * numbers)

    @cached_property  # a search asks for it many times
    def products(self) -> dict[str, float]:
        """Seconds of the products of a layer's forward pass."""
        parts = dict[str, float]()
        for name, sizes in self._sizes.items():
            parts[name] = sum(count * self.product(k, n, m, self.run.fp8 is not None) for count, m, k, n in sizes)
        if self.model.num_experts:
            parts["router"] = self.product(self.model.hidden_size, self.model.num_experts)
        return parts

    @property
    def backward_products(self) -> dict[str, float]:
        """Seconds of each of the two products of a layer's backward pass, for its inputs and for its weights."""
        slower = FLOAT32_SUMS if self.run.fp8 else 1.0
        return {name: seconds * (slower if name in self._sizes else 1.0) for name, seconds in self.products.items()}

    def product(self, k: int, n: int, tokens: float | None = None, fp8: bool = False) -> float:
        """Seconds of [tokens, k] by [k, n]: at the rate for its size, or as fast as memory allows.

        By default they are the tokens of the rank, and numbers of the model's dtype.
        """
        m = tokens or self.run.tokens
        sizes, speeds = self._rates("fp8" if fp8 else self.run.dtype)
        speed = 1e12 * float(numpy.interp(math.log(m * k * n) / 3, sizes, speeds))
        computing = 2 * m * k * n / speed * self.slower
        moving = self._seconds((1 if fp8 else self.run.itemsize) * (m * k + k * n) + self.run.itemsize * m * n)
        return max(computing, moving)

    def _rates(self, dtype: str) -> tuple[list[float], list[float]]:
        """Logarithms of the sizes of products, and their TFLOP/s: those of `dtype`, or of another 16-bit one."""
        device = self.device
        known = [rate for rate in device.gemm or () if (rate.dtype == "fp8") == (dtype == "fp8")]
        peak = device.peak_fp8_TFLOP_s if dtype == "fp8" else device.peak_TFLOP_s
        rates = known or [GemmRate(size=1, TFLOP_s=OF_PEAK * (peak or 0.0))]
        nearest = min((rate.dtype for rate in rates), key=lambda known: known != dtype)
        chosen = sorted((math.log(rate.size), rate.TFLOP_s) for rate in rates if rate.dtype == nearest)
        return [size for size, _ in chosen], [speed for _, speed in chosen]

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

    def gradient_sum(self, parameters: int) -> float:
        """Gradients of a micro batch are added to the sums of those before it."""
        read = 0 if self.run.gradient_accumulation_fusion else self.run.itemsize
        return self._seconds((read + 2 * self.run.grad_itemsize) * parameters)

    def optimizer(self, parameters: int) -> float:
        """Adam for the parameters of a rank's part: norm and clipping of gradients, moments, weights."""
        copies = 2 if self.run.itemsize == 2 else 0  # 16-bit weights are written beside their float32 copies
        return self._seconds((4 + 8 + 4 + 16 + 8 + copies) * parameters)

    def _moving(self, numbers: float) -> float:
        return self._seconds(numbers * self.run.itemsize * self.run.tokens)

    def _seconds(self, size: float) -> float:
        return size / (self.device.memory_GB_s * 1e9) * self.slower
