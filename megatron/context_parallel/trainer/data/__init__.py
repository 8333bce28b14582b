"""From files of token ids to batches.

In: `.bin/.idx` files, or chats. Out: micro batches for this data-parallel rank. Start with `batches.py`.
"""
