"""Integer handles of objects. PyTorch operators accept only tensors and numbers."""

from itertools import count
from typing import Any
from weakref import WeakValueDictionary

from megatron.context_parallel.errors import UsageError

_numbers = count(1)
_objects: WeakValueDictionary[int, "HasHandle"] = WeakValueDictionary()


class HasHandle:
    """An object with a `handle`: an integer that is unique in the process and never reused. A copy has another one."""

    handle: int

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        made = super().__new__(cls)
        made.handle = next(_numbers)
        _objects[made.handle] = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        """The state for a copy, also in another process: everything except the handle."""
        return {name: value for name, value in self.__dict__.items() if name != "handle"}


class HandleOf(HasHandle):
    """Gives a handle to a value of any type."""

    def __init__(self, value: Any) -> None:
        self.value = value


def handle_of(x: HasHandle | None) -> int:
    """0 for None."""
    return x.handle if x is not None else 0


def object_of(handle: int, what: str) -> Any:
    """The object of a handle; None for 0.

    Raises:
        UsageError: the object was freed.
    """
    if not handle:
        return None
    if (found := _objects.get(handle)) is None:
        raise UsageError(f"{what}: it was freed before its last use; keep it until the end of the backward pass")
    return found
