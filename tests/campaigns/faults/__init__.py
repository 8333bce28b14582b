"""A campaign of injected faults: training jobs whose ranks are forked from one warmed process, and what became of them.

`job` starts a job and tells what happened, `moments` says when a fault strikes, `actions` what it does, and `bench`
has the tiny runs it strikes.
"""
