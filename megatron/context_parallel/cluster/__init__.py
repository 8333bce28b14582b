"""Clusters as data, and how long plans and training steps take on them.

In: the description of a cluster (`description.py`, `presets/`), plans, sizes of a model. Out: seconds, bytes, and the
fastest strategy. The folders build on each other: `measure/` (rates of this machine), `simulate/` (one pass),
`step/` (a training iteration), `search/` (the fastest choice). Start with `description.py`.
"""
