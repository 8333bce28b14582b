"""Names and sizes that kernels and commands share, for commands that do not import torch yet."""

BACKENDS = ("auto", "aten", "cudnn", "flash2", "flash3", "flash4", "triton")  # `refusals.py` has their limits
KV_CACHE_DTYPES = ("auto", "int8", "fp8")  # `quantized.py` has the formats
SCALE_BYTES = 4  # of a row of a head in 8 bits
DELTA_AT_ONCE = 2**24  # bytes of a copy of rows of an output, in float32 or wider
