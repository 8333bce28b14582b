"""Checks the GPU path on one GPU: `cp-gpu-check`, from a checkout; needs nothing but torch."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where this project is not installed

from megatron.context_parallel.commands.programs import gpu_check

if __name__ == "__main__":
    gpu_check()
