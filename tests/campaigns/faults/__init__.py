"""A campaign of injected faults in training jobs, whose ranks are forked from one process that has imported everything.

`job` starts a job and reports what happened. `moments` says when a fault happens, and `actions` what it does. `bench`
has the tiny runs.
"""
