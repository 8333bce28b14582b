"""Injects faults into training jobs: `python -m tests.campaigns.faults --count 60 --seed 0`."""

import os
import sys

os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # as pretrain sets it, before torch is imported

from .campaign import main

sys.exit(main())
