"""Long-context inference: prefill, turns and decode over a cache of keys and values that the ranks share."""
