"""Fields of a description by their path, such as `nics.GB_s` or `device.gemm[0].TFLOP_s` of a cluster."""

import re
from dataclasses import is_dataclass, replace
from typing import Any

from megatron.context_parallel.errors import UsageError

from .description import Cluster, check_number


def field_of(described: Any, path: str) -> Any:
    """The value of a field of a description.

    Raises:
        UsageError: there is no such field.
    """
    first, *rest = path.split(".", 1)
    name, place = _place(first)
    if not is_dataclass(described) or not hasattr(described, name):
        raise UsageError(f"{path}: no such field")
    value = getattr(described, name)
    if place is not None:
        if not isinstance(value, tuple) or place >= len(value):
            raise UsageError(f"{path}: no such field")
        value = value[place]
    return field_of(value, rest[0]) if rest else value


def with_field(described: Any, path: str, value: float) -> Any:
    """The description with another value of a field."""
    first, *rest = path.split(".", 1)
    name, place = _place(first)
    old = getattr(described, name)
    whole = old if place is None else old[place]
    new = with_field(whole, rest[0], value) if rest else value
    if place is not None:
        new = (*old[:place], new, *old[place + 1 :])
    return replace(described, **{name: new})


def _place(part: str) -> tuple[str, int | None]:
    found = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", part)
    if not found:
        raise UsageError(f"{part}: no such field")
    return found[1], int(found[2]) if found[2] else None


def what_if(cluster: Cluster, changes: str) -> Cluster:
    """The cluster with other values of some fields, such as "nics.GB_s=100,nics.latency_us=5".

    Raises:
        UsageError: there is no such field, it is not a number, or the value is not one that it may have.
    """
    for change in changes.split(","):
        path, _, text = change.partition("=")
        old = field_of(cluster, path)
        if not isinstance(old, int | float) or isinstance(old, bool):
            raise UsageError(f"--what-if {change}: not a number in {cluster.name}; give one such as nics.GB_s=100")
        try:
            value = type(old)(text)
        except ValueError:
            raise UsageError(f"--what-if {change}: need a number, such as {path}={old:g}") from None
        cluster = with_field(cluster, path, check_number(value, f"--what-if {path}"))
    return cluster
