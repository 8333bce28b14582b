"""Serving text over HTTP as OpenAI's completions and chat completions."""
