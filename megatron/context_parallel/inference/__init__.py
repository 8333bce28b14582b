"""Long-context inference: prefill, turns and decoding with a cache of keys and values that is sharded over ranks."""
