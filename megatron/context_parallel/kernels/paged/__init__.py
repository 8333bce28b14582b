"""The paged kernel: attention of single query rows over cached keys where they lie, in Triton.

In: queries of a decode step, a cache in pages, and for each query its pages as a tensor. Out: partial outputs with
their log-sum-exp. Start with `kernel.py`; the device code is in `device.py`.
"""

from .kernel import PagedKernel, Seen, merge_rows, refusal

__all__ = ["PagedKernel", "Seen", "merge_rows", "refusal"]
