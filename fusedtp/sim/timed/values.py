"""Stand-ins for a kernel's tensors: they hold only what control flow and accounting need.

A scalar integer is a Python int. A tile of integers or pointers is affine where possible (base + step_d * i_d), as
address arithmetic usually is, and an array otherwise. Values computed from floating point data are only a shape and a
dtype.

    rows = 3 * 128 + tl.arange(0, 128)      Tile base 384, steps (1,)
    x + rows[:, None] * stride              Tile of pointers, steps (2 * stride, 0)
    tl.dot(a, b)                            Tile without a value
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ..faults import UnsupportedKernel
from .masks import Mask, Shape, broadcast, kept_axes


class Tile:
    """A block of integers or pointers (affine, or an array in `data`), or of values that are not computed."""

    __slots__ = ("base", "data", "dtype", "known", "shape", "steps")

    def __init__(
        self,
        shape: Shape,
        dtype: Any,
        base: int = 0,
        steps: Shape = (),
        data: np.ndarray | None = None,
        known: bool = True,
    ) -> None:
        self.shape, self.dtype, self.base, self.steps = shape, dtype, base, steps
        self.data, self.known = data, known

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def affine(self) -> bool:
        return self.known and self.data is None

    def dense(self) -> np.ndarray:
        """All values, int64. Raises UnsupportedKernel if they depend on data."""
        if not self.known:
            raise UnsupportedKernel(
                "an address or a branch depends on floating point data, which a timed run does not compute"
            )
        if self.data is not None:
            return self.data
        out = np.full(self.shape, self.base, np.int64)
        for axis, (n, step) in enumerate(zip(self.shape, self.steps, strict=True)):
            if step:
                out += (step * np.arange(n)).reshape([-1 if a == axis else 1 for a in range(len(self.shape))])
        return out

    def to(self, dtype: Any, **_: Any) -> Tile:
        data = None if self.data is None else wrapped(self.data, dtype)
        return Tile(self.shape, dtype, self.base, self.steps, data, self.known)

    def __getitem__(self, index: Any) -> Tile:
        keep = kept_axes(index, len(self.shape))
        shape = tuple(1 if a is None else self.shape[a] for a in keep)
        steps = tuple(0 if a is None else self.steps[a] for a in keep) if self.affine else ()
        data = None if self.data is None else self.data.reshape(shape)
        return Tile(shape, self.dtype, self.base, steps, data, self.known)

    def __bool__(self) -> bool:
        if self.size != 1:
            raise UnsupportedKernel("a branch on a block of values; the condition must be a scalar")
        return bool(self.dense().item())

    __index__ = None  # a block is not a number

    def __add__(self, other: Any) -> Any:
        return _linear(self, other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return _linear(self, other, -1)

    def __rsub__(self, other: Any) -> Any:
        return _scaled(self, -1) + other

    def __mul__(self, other: Any) -> Any:
        if type(other) is int:
            return _scaled(self, other)
        return elementwise(np.multiply, self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Tile:
        return unknown_like(self, other)

    __rtruediv__ = __truediv__

    def __neg__(self) -> Tile:
        return _scaled(self, -1)

    def __lt__(self, other: Any) -> Mask:
        return compare("lt", self, other)

    def __le__(self, other: Any) -> Mask:
        return compare("le", self, other)

    def __gt__(self, other: Any) -> Mask:
        return compare("gt", self, other)

    def __ge__(self, other: Any) -> Mask:
        return compare("ge", self, other)

    def __eq__(self, other: Any) -> Mask:  # type: ignore[override]
        return compare("eq", self, other)

    def __ne__(self, other: Any) -> Mask:  # type: ignore[override]
        return compare("ne", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __and__(self, other: Any) -> Any:
        return elementwise(np.bitwise_and, self, other)

    def __or__(self, other: Any) -> Any:
        return elementwise(np.bitwise_or, self, other)

    def __xor__(self, other: Any) -> Any:
        return elementwise(np.bitwise_xor, self, other)

    def __lshift__(self, other: Any) -> Any:
        return elementwise(np.left_shift, self, other)

    def __rshift__(self, other: Any) -> Any:
        return elementwise(np.right_shift, self, other)

    __rand__, __ror__ = __and__, __or__

    @property
    def T(self) -> Tile:
        return transpose(self)


def wrapped(value: Any, dtype: Any) -> Any:
    """Wraps an integer or an array of integers to int32 if that is the dtype."""
    if dtype.is_int() and dtype.primitive_bitwidth == 32 and not dtype.is_int_unsigned():
        return (value + 2**31) % 2**32 - 2**31
    return value


def wider(a: Any, b: Any) -> Any:
    """The dtype of the sum of two values."""
    if a is b or b is None:
        return a
    if a is None:
        return b
    if a.is_ptr() or b.is_ptr():
        return a if a.is_ptr() else b
    rank = lambda t: (t.is_floating(), t.primitive_bitwidth)  # noqa: E731
    return a if rank(a) >= rank(b) else b


def _item(dtype: Any) -> int:
    """Bytes per pointer increment; 1 for integers."""
    return max(1, dtype.element_ty.primitive_bitwidth // 8) if dtype is not None and dtype.is_ptr() else 1


@lru_cache(maxsize=4096)
def _spread(steps: Shape, own: Shape, shape: Shape, scale: int) -> Shape:
    """The scaled steps of a block of shape `own`, broadcast to `shape`: 0 along broadcast axes."""
    steps = (0,) * (len(shape) - len(own)) + steps
    own = (1,) * (len(shape) - len(own)) + own
    return tuple(scale * s if n == m else 0 for s, n, m in zip(steps, own, shape, strict=True))


def _linear(a: Tile, b: Any, sign: int) -> Tile:
    """a + sign * b; a pointer advances by elements."""
    if isinstance(b, int):
        by = sign * b * _item(a.dtype)
        if a.data is not None:
            return Tile(a.shape, a.dtype, data=a.data + by)
        return Tile(a.shape, a.dtype, a.base + by, a.steps, None, a.known)
    if not isinstance(b, Tile):
        return unknown_like(a, b)
    shape = broadcast(a.shape, b.shape)
    if not a.known or not b.known:
        return Tile(shape, wider(a.dtype, b.dtype), known=False)
    both = a.dtype.is_ptr() and b.dtype.is_ptr()
    scale_a = 1 if both else _item(b.dtype) if not a.dtype.is_ptr() else 1
    scale_b = sign if both else sign * (_item(a.dtype) if not b.dtype.is_ptr() else 1)
    dtype = wider(a.dtype, b.dtype)
    if a.data is None and b.data is None:
        ours, theirs = _spread(a.steps, a.shape, shape, scale_a), _spread(b.steps, b.shape, shape, scale_b)
        steps = tuple(map(operator.add, ours, theirs))
        return Tile(shape, dtype, scale_a * a.base + scale_b * b.base, steps)
    return Tile(shape, dtype, data=scale_a * a.dense() + scale_b * b.dense())


def _scaled(tile: Tile, by: int) -> Tile:
    if tile.data is not None:
        return Tile(tile.shape, tile.dtype, data=tile.data * by)
    return Tile(tile.shape, tile.dtype, tile.base * by, tuple(s * by for s in tile.steps), None, tile.known)


def unknown_like(*values: Any) -> Tile:
    """The result of an elementwise function that is not computed: only shape and dtype."""
    shape: Shape = ()
    dtype = None
    for value in values:
        if isinstance(value, (Tile, Mask)):
            shape = broadcast(shape, value.shape)
            if isinstance(value, Tile):
                dtype = wider(value.dtype, dtype)
    return Tile(shape, dtype, known=False)


def elementwise(function: Callable, a: Any, b: Any) -> Any:
    """function(a, b) on integers, as an array."""
    for value in (a, b):
        if isinstance(value, float) or (isinstance(value, Tile) and not value.known):
            return unknown_like(a, b)
    left, right = _array(a), _array(b)
    out = function(left, right)
    dtype = wider(getattr(a, "dtype", None), getattr(b, "dtype", None))
    return Tile(out.shape, dtype, data=out)


def _array(value: Any) -> np.ndarray:
    if isinstance(value, Mask):
        return value.dense().astype(np.int64)
    return value.dense() if isinstance(value, Tile) else np.asarray(value)


def compare(name: str, a: Tile, b: Any) -> Mask:
    """a `name` b, as a box of bounds if a - b is affine along one axis."""
    if isinstance(b, float) or (isinstance(b, Tile) and not b.known) or not a.known:
        return Mask(unknown_like(a, b).shape, None, known=False)
    difference = a - b if isinstance(b, Tile) else a
    limit = 0 if isinstance(b, Tile) else int(b)
    if difference.affine and name in ("lt", "ge", "le", "gt"):
        moving = [d for d, s in enumerate(difference.steps) if s]
        if len(moving) <= 1 and all(difference.steps[d] > 0 for d in moving):
            limit += name in ("le", "gt")
            axis = moving[0] if moving else -1
            step, n = (difference.steps[axis], difference.shape[axis]) if moving else (1, 1)
            edge = min(n, max(0, -((difference.base - limit) // step)))
            inside = (0, edge) if name in ("lt", "le") else (edge, n)
            bounds = [(0, m) for m in difference.shape]
            if moving:
                bounds[axis] = inside
            elif inside[1] <= inside[0]:
                bounds = [(0, 0)] * len(bounds)
            if moving or bounds:
                return Mask(difference.shape, tuple(bounds))
    data = getattr(operator, name)(difference.dense(), limit)
    return Mask(difference.shape, None, np.asarray(data))


def transpose(tile: Any) -> Any:
    """The transpose of a block of two axes."""
    if isinstance(tile, Mask):
        return Mask(tile.shape[::-1], None, tile.dense().T)
    data = None if tile.data is None else tile.data.T
    return Tile(tile.shape[::-1], tile.dtype, tile.base, tile.steps[::-1], data, tile.known)
