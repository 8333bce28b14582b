"""Keys and values that our ranks prefilled, for vLLM to decode with.

In: a ticket in a request's `kv_transfer_params`. Out: rows of keys and values in vLLM's cache.
Start with `connector.py` (the class that vLLM loads), then `pull.py` (streams from our ranks) and `wire.py` (the
protocol). Nothing here needs megatron-core, and only `connector.py` and `counters.py` need vLLM.
"""
