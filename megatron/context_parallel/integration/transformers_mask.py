"""Converts a mask function of transformers to one of our masks.

A mask of transformers is a function of two positions, composed of smaller functions. It is called once with symbolic
positions. The result then holds for all positions, or the mask is rejected.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from inspect import getfile
from traceback import walk_tb
from typing import Any

import torch

from megatron.context_parallel.errors import UsageError
from megatron.context_parallel.patches.transformers import without_documents
from megatron.context_parallel.tokens.mask import Mask

_OURS = (__file__, getfile(without_documents))
MaskFunction = Callable[[Any, Any, Any, Any], Any]  # of sample, head, position of the query, position of the key


def mask_of(function: MaskFunction) -> Mask:
    """The mask of a mask function of transformers, without its packed documents.

    Raises:
        UsageError: it depends on more than the distance from query to key, or excludes the query's own key.
    """
    try:
        seen = _Keys.of(without_documents(function)(_Unknown(), _Unknown(), _Position(1, 0), _Position(0, 1)))
    except Exception as error:  # a function of transformers or the user may fail in any way on symbols
        raise _refusal(_where(error) or function.__qualname__) from None
    if not seen.first <= 0 <= seen.last:
        raise _refusal(function.__qualname__)
    before = -1 if seen.first == -math.inf else int(-seen.first)
    causal = seen.last == 0
    return Mask(causal, (before, -1 if causal or seen.last == math.inf else int(seen.last)))


def _where(error: Exception) -> str:
    """The innermost function outside of this package."""
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    names = [code.co_qualname for code in codes if code.co_filename not in _OURS]
    return names[-1] if names else ""


def _refusal(name: str) -> UsageError:
    of = name.partition(".<locals>")[0]
    return UsageError(f"attention mask of {of}: not supported; use a causal or full mask, or a sliding window")


class _Unknown:
    """An unknown value: every use of it is an error."""

    def _refuse(self, *_: object) -> Any:
        raise TypeError("unknown")

    __eq__ = __ne__ = __bool__ = _refuse
    __hash__ = object.__hash__


@dataclass(frozen=True, eq=False)
class _Keys(_Unknown):
    """The keys that a query sees: from `first` to `last`, relative to the query's own position."""

    first: float
    last: float
    device = torch.device("cpu")

    @classmethod
    def of(cls, answer: "_Keys | bool | torch.Tensor") -> "_Keys":
        if isinstance(answer, _Keys):
            return answer
        return cls(-math.inf, math.inf) if bool(answer) else cls(math.inf, -math.inf)

    def __and__(self, other: "_Keys | bool | torch.Tensor") -> "_Keys":
        other = _Keys.of(other)
        return _Keys(max(self.first, other.first), min(self.last, other.last))

    def __or__(self, other: "_Keys | bool | torch.Tensor") -> "_Keys":
        other = _Keys.of(other)
        some = [keys for keys in (self, other) if keys.first <= keys.last]
        if len(some) == 2 and max(self.first, other.first) > min(self.last, other.last) + 1:
            raise TypeError("two ranges of keys")
        return _Keys(min(self.first, other.first), max(self.last, other.last))

    def to(self, *_: object, **__: object) -> "_Keys":
        return self


@dataclass(frozen=True, eq=False)
class _Position(_Unknown):
    """q times the query's position, plus kv times the key's position, plus a number."""

    q: int
    kv: int
    plus: int = 0

    def _times(self, factor: int) -> "_Position":
        return _Position(self.q * factor, self.kv * factor, self.plus * factor)

    def __add__(self, other: "_Position | int") -> "_Position":
        if isinstance(other, _Position):
            return _Position(self.q + other.q, self.kv + other.kv, self.plus + other.plus)
        if type(other) is not int:
            raise TypeError(f"{other}: not known for all positions")
        return _Position(self.q, self.kv, self.plus + other)

    def __sub__(self, other: "_Position | int") -> "_Position":
        return self + (other._times(-1) if isinstance(other, _Position) else -other)

    def __abs__(self) -> "_Distance":
        return _Distance(self)

    def __le__(self, other: "_Position | int") -> _Keys:
        of = self - other  # is it 0 or less?
        match of.q, of.kv:
            case -1, 1:
                return _Keys(-math.inf, -of.plus)
            case 1, -1:
                return _Keys(of.plus, math.inf)
            case (-1, 0) | (0, -1) if of.plus <= 0:  # a position is not negative
                return _Keys(-math.inf, math.inf)
        raise TypeError("depends on more than the distance")

    def __lt__(self, other: "_Position | int") -> _Keys:
        return self + 1 <= other

    def __ge__(self, other: "_Position | int") -> _Keys:
        return self._times(-1) <= (other._times(-1) if isinstance(other, _Position) else -other)

    def __gt__(self, other: "_Position | int") -> _Keys:
        return self - 1 >= other

    def new_ones(self, *_: object, **__: object) -> _Keys:
        return _Keys.of(True)

    def new_zeros(self, *_: object, **__: object) -> _Keys:
        return _Keys.of(False)


@dataclass(frozen=True, eq=False)
class _Distance(_Unknown):
    """The absolute value of a difference of positions."""

    of: _Position

    def __le__(self, most: int) -> _Keys:
        return (self.of <= most) & (self.of >= -most)

    def __lt__(self, limit: int) -> _Keys:
        return self <= limit - 1
