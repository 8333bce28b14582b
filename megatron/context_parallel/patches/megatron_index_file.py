"""The header of an index of tokens. megatron-core's own reader only asserts that a file begins with it."""

from megatron.core.datasets.indexed_dataset import _INDEX_HEADER

CHECKED = {"megatron-core": "0.16 to 0.19"}

HEADER = _INDEX_HEADER  # bytes
