"""A model and a device whose times are easy to work out."""

from megatron.context_parallel.cluster.description import AttentionRate, Device, GemmRate
from megatron.context_parallel.cluster.step.model_shape import ModelShape

# Memory and launches cost nothing, and all computing has the peak rate.
IDEAL = Device(
    name="ideal",
    peak_TFLOP_s=1,
    memory_GiB=1000,
    memory_GB_s=1e12,
    block_us=0,
    kernel_us=0,
    gemm=(GemmRate(size=1, TFLOP_s=1),),
    attention=(AttentionRate(rows=1, forward_TFLOP_s=1, backward_TFLOP_s=1),),
)

MODEL = ModelShape(
    num_layers=4,
    hidden_size=256,
    ffn_hidden_size=512,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=32,
    padded_vocab_size=1024,
)
