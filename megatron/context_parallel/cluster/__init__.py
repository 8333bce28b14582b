"""Clusters as data, and how long plans take on them."""
