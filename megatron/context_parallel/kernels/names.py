"""The values of `--cp-attention-backend`; `kernels/choose.py` knows what each can."""

BACKENDS = ("auto", "aten", "cudnn", "flash2", "flash3", "flash4", "triton")
