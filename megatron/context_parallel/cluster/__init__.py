"""Clusters as data, and how long plans take on them."""

from .description import Cluster, load_cluster

__all__ = ["Cluster", "load_cluster"]
