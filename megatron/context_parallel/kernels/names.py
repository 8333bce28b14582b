"""The values of `--cp-attention-backend`; `kernels/choose.py` has the limits of each."""

BACKENDS = ("auto", "aten", "cudnn", "flash2", "flash3", "flash4", "triton")
