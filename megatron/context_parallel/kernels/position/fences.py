"""A fault of older releases of Triton: products of tensor cores may read shared memory before it is written.

From sm_90 on, tensor cores see what threads copied to shared memory only after a fence. Triton sets it from 3.7.1 on
(Triton's pull request 10537). Before, the position kernel sets it itself on sm_90 (`parts.py`). It cannot on sm_100,
where Triton 3.6 also lacks barriers (pull request 9615): Triton then does not compile the pipelines of its loops.
"""

from torch.torch_version import TorchVersion

FENCED = "3.7.1"


def lacking(version: str) -> bool:
    """Whether this version of Triton leaves out the fences."""
    return TorchVersion(version) < FENCED
