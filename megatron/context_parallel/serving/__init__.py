"""Serves text over HTTP with OpenAI's protocol.

In: HTTP requests. Out: completions, whole or streamed, from an engine of `inference/`.
Start with `app.py` (routes), then `protocol.py` (what a client may send) and `worker.py` (the thread that generates).
"""
