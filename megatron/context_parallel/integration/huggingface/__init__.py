"""Folders of HuggingFace: their config.json and their weights."""
