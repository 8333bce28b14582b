"""Releases of libraries, to compare."""

from importlib import metadata


def release_of(version: str) -> tuple[int, int]:
    """The first two numbers of a version: (2, 13) for "2.13.0+cpu"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def installed(library: str) -> tuple[int, int]:
    """The release of a library that is installed."""
    return release_of(metadata.version(library))
