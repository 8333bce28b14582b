"""How an index of tokens begins. Where a file does not begin so, megatron-core's own reader fails an assertion."""

from megatron.core.datasets.indexed_dataset import _INDEX_HEADER

CHECKED = {"megatron-core": "0.16 to 0.19"}

HEADER = _INDEX_HEADER  # bytes
