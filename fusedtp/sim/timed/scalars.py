"""Functions that the rewritten source of a kernel calls where Python's operators on integers differ from Triton's."""

from __future__ import annotations

from typing import Any

import numpy as np

from .masks import Mask, triton_language
from .values import Tile, elementwise, wrapped


def quotient(a: Any, b: Any) -> Any:
    """a // b rounded towards zero, as compiled code divides."""
    if type(a) is int and type(b) is int:
        return a // b if (a >= 0) == (b > 0) else -(-a // b)
    if isinstance(a, (Tile, Mask)) or isinstance(b, (Tile, Mask)):
        return elementwise(lambda x, y: (x - np.fmod(x, y)) // y, a, b)
    return a // b


def remainder(a: Any, b: Any) -> Any:
    """a % b with the sign of a."""
    if type(a) is int and type(b) is int:
        return a - quotient(a, b) * b
    if isinstance(a, (Tile, Mask)) or isinstance(b, (Tile, Mask)):
        return elementwise(np.fmod, a, b)
    return a % b


def inverted(a: Any) -> Any:
    """~a; for a scalar condition, its negation."""
    return (not a) if isinstance(a, bool) else ~a


def converted(value: Any, dtype: Any, **_: Any) -> Any:
    """value.to(dtype); an integer cast to a pointer is an address."""
    if isinstance(value, Mask):
        data = value.dense().astype(np.int64) if value.known else None
        return Tile(value.shape, dtype, data=data, known=value.known)
    if isinstance(value, Tile):
        return value.to(dtype)
    if dtype.is_ptr():
        return Tile((), dtype, int(value))
    return float(value) if dtype.is_floating() else value if isinstance(value, bool) else wrapped(int(value), dtype)


def dtype_of(value: Any) -> Any:
    """value.dtype, also for plain numbers."""
    if isinstance(value, bool):
        return triton_language().int1
    if isinstance(value, int):
        return triton_language().int32
    return triton_language().float32 if isinstance(value, float) else value.dtype
