"""Releases of libraries, to compare."""

from importlib import metadata

from megatron.context_parallel.patches import release_of


def installed(library: str) -> tuple[int, int]:
    """The release of a library that is installed."""
    return release_of(metadata.version(library))
