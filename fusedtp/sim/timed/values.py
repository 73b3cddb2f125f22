"""Stand-ins for a kernel's tensors: what control flow and accounting need of them, and no more.

A scalar integer is a Python int. A tile of integers or pointers is affine where it can be (base + step_d * i_d),
which is what address arithmetic makes, and an array where it is not. A mask is a box of bounds where it can be. What
is computed from floating point data is only a shape and a dtype.

    rows = 3 * 128 + tl.arange(0, 128)      Tile base 384, steps (1,)
    rows < 400                              Mask bounds ((0, 16),)
    x + rows[:, None] * stride              Tile of pointers, steps (2 * stride, 0)
    tl.dot(a, b)                            Tile without a value
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ..faults import UnsupportedKernel

Shape = tuple[int, ...]
Number = int | float | bool


class Tile:
    """A block of integers or pointers (affine, or an array in `data`), or of numbers that nobody computes."""

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
        """All values, int64. Raises UnsupportedKernel where they depend on data."""
        if not self.known:
            raise UnsupportedKernel(
                "an address or a branch depends on floating point data, which a timed run leaves out"
            )
        if self.data is not None:
            return self.data
        out = np.full(self.shape, self.base, np.int64)
        for axis, (n, step) in enumerate(zip(self.shape, self.steps, strict=True)):
            if step:
                out += (step * np.arange(n)).reshape([-1 if a == axis else 1 for a in range(len(self.shape))])
        return out

    def to(self, dtype: Any, **_: Any) -> Tile:
        return Tile(self.shape, dtype, self.base, self.steps, self.data, self.known)

    def __getitem__(self, index: Any) -> Tile:
        keep = _kept_axes(index, len(self.shape))
        shape = tuple(1 if a is None else self.shape[a] for a in keep)
        steps = tuple(0 if a is None else self.steps[a] for a in keep) if self.affine else ()
        data = None if self.data is None else self.data.reshape(shape)
        return Tile(shape, self.dtype, self.base, steps, data, self.known)

    def __bool__(self) -> bool:
        if self.size != 1:
            raise UnsupportedKernel("a branch on a block of values")
        return bool(self.dense().item())

    __index__ = None  # a block is no number

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


class Mask:
    """Which elements of a block: the box of `bounds` (low, high for each axis), or an array, or data-dependent."""

    __slots__ = ("bounds", "data", "known", "shape")

    def __init__(
        self,
        shape: Shape,
        bounds: tuple[tuple[int, int], ...] | None,
        data: np.ndarray | None = None,
        known: bool = True,
    ) -> None:
        self.shape, self.bounds, self.data, self.known = shape, bounds, data, known

    @property
    def dtype(self) -> Any:
        return _language().int1

    def dense(self) -> np.ndarray:
        if not self.known:
            raise UnsupportedKernel("a branch depends on floating point data, which a timed run leaves out")
        if self.data is not None:
            return self.data
        assert self.bounds is not None
        out = np.zeros(self.shape, bool)
        out[tuple(slice(low, high) for low, high in self.bounds)] = True
        return out

    def count(self, shape: Shape) -> int:
        """Elements of a block of this shape, to which the mask is broadcast. Data-dependent ones count as all."""
        total = math.prod(shape)
        if not self.known:
            return total
        if self.data is not None:
            return int(np.count_nonzero(self.data)) * (total // max(1, self.data.size))
        assert self.bounds is not None
        if self.shape == shape:
            return math.prod([max(0, high - low) for low, high in self.bounds])
        for n, (low, high), full in zip(self.shape, self.bounds, shape[len(shape) - len(self.shape) :]):
            total = total // full * max(0, high - low) * (full // n)
        return total

    @property
    def everywhere(self) -> bool:
        return (
            self.bounds is not None
            and self.known
            and all(b == (0, n) for n, b in zip(self.shape, self.bounds, strict=True))
        )

    def __bool__(self) -> bool:
        if math.prod(self.shape) != 1:
            raise UnsupportedKernel("a branch on a block of values")
        return bool(self.dense().item())

    def __getitem__(self, index: Any) -> Mask:
        keep = _kept_axes(index, len(self.shape))
        shape = tuple(1 if a is None else self.shape[a] for a in keep)
        bounds = None
        if self.bounds is not None:
            bounds = tuple((0, 1) if a is None else self.bounds[a] for a in keep)
        return Mask(shape, bounds, None if self.data is None else self.data.reshape(shape), self.known)

    def to(self, dtype: Any, **_: Any) -> Tile:
        if not self.known:
            return Tile(self.shape, dtype, known=False)
        return Tile(self.shape, dtype, data=self.dense().astype(np.int64))

    def __and__(self, other: Any) -> Mask:
        if isinstance(other, (bool, int)):
            return self if other else Mask(self.shape, tuple((0, 0) for _ in self.shape))
        shape = broadcast(self.shape, other.shape)
        if not self.known or not other.known:
            return Mask(shape, None, known=False)
        if self.bounds is not None and other.bounds is not None and len(self.shape) == len(other.shape):
            bounds = []
            for n, a, an, b, bn in zip(shape, self.bounds, self.shape, other.bounds, other.shape):
                a, b = _stretched(a, an, n), _stretched(b, bn, n)
                bounds.append((max(a[0], b[0]), min(a[1], b[1])))
            return Mask(shape, tuple(bounds))
        return Mask(shape, None, self.dense() & other.dense())

    __rand__ = __and__

    def __or__(self, other: Any) -> Mask:
        if isinstance(other, (bool, int)):
            return self if not other else Mask(self.shape, tuple((0, n) for n in self.shape))
        shape = broadcast(self.shape, other.shape)
        if not self.known or not other.known:
            return Mask(shape, None, known=False)
        return Mask(shape, None, self.dense() | other.dense())

    __ror__ = __or__

    def __invert__(self) -> Mask:
        return Mask(self.shape, None, ~self.dense()) if self.known else self


def _stretched(bounds: tuple[int, int], own: int, wanted: int) -> tuple[int, int]:
    """Bounds of an axis of one element, stretched to `wanted`."""
    if own == wanted:
        return bounds
    return (0, wanted) if bounds[1] > bounds[0] else (0, 0)


def _kept_axes(index: Any, dims: int) -> list[int | None]:
    """Axes of a block after an index of None and ':' only."""
    index = index if isinstance(index, tuple) else (index,)
    kept: list[int | None] = []
    axis = 0
    for i in index:
        if i is None:
            kept.append(None)
        elif i == slice(None):
            kept.append(axis)
            axis += 1
        else:
            raise UnsupportedKernel(f"a block indexed by {i!r}; only None and ':' are")
    return kept + list(range(axis, dims))


def broadcast(a: Shape, b: Shape) -> Shape:
    """The shape that both have when broadcast."""
    if a == b:
        return a
    if len(a) < len(b):
        a, b = b, a
    extra = len(a) - len(b)
    return a[:extra] + tuple(m if n == 1 else n for n, m in zip(a[extra:], b, strict=True))


def wider(a: Any, b: Any) -> Any:
    """The dtype of a sum of the two."""
    if a is b or b is None:
        return a
    if a is None:
        return b
    if a.is_ptr() or b.is_ptr():
        return a if a.is_ptr() else b
    rank = lambda t: (t.is_floating(), t.primitive_bitwidth)  # noqa: E731
    return a if rank(a) >= rank(b) else b


def _item(dtype: Any) -> int:
    """Bytes that one step of a pointer is."""
    return max(1, dtype.element_ty.primitive_bitwidth // 8) if dtype is not None and dtype.is_ptr() else 1


def _spread(tile: Tile, shape: Shape) -> Shape:
    """Its steps as a block of `shape`: none along what is broadcast."""
    steps = (0,) * (len(shape) - len(tile.shape)) + tile.steps
    own = (1,) * (len(shape) - len(tile.shape)) + tile.shape
    return tuple(s if n == m else 0 for s, n, m in zip(steps, own, shape, strict=True))


def _linear(a: Tile, b: Any, sign: int) -> Tile:
    """a + sign * b; a step of a pointer is one element."""
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
        steps = tuple(
            scale_a * x + scale_b * y for x, y in zip(_spread(a, shape), _spread(b, shape), strict=True)
        )
        return Tile(shape, dtype, scale_a * a.base + scale_b * b.base, steps)
    return Tile(shape, dtype, data=scale_a * a.dense() + scale_b * b.dense())


def _scaled(tile: Tile, by: int) -> Tile:
    if tile.data is not None:
        return Tile(tile.shape, tile.dtype, data=tile.data * by)
    return Tile(tile.shape, tile.dtype, tile.base * by, tuple(s * by for s in tile.steps), None, tile.known)


def unknown_like(*values: Any) -> Tile:
    """What is computed from these element by element and left out: only its shape and dtype."""
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
    """a `name` b: a box of bounds where a - b is affine along one axis."""
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
    """The last two axes swapped, of a block of two."""
    if isinstance(tile, Mask):
        return Mask(tile.shape[::-1], None, tile.dense().T)
    data = None if tile.data is None else tile.data.T
    return Tile(tile.shape[::-1], tile.dtype, tile.base, tile.steps[::-1], data, tile.known)


def quotient(a: Any, b: Any) -> Any:
    """a // b as the compiler divides: towards zero."""
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
    """~a; of a scalar condition its negation."""
    return (not a) if isinstance(a, bool) else ~a


@cache
def _language() -> Any:
    import triton.language as tl

    return tl


def converted(value: Any, dtype: Any, **_: Any) -> Any:
    """value.to(dtype); an integer that becomes a pointer is an address."""
    if isinstance(value, (Tile, Mask)):
        return value.to(dtype)
    if dtype.is_ptr():
        return Tile((), dtype, int(value))
    return float(value) if dtype.is_floating() else value if isinstance(value, bool) else int(value)


def dtype_of(value: Any) -> Any:
    """value.dtype, also of a plain number."""
    if isinstance(value, bool):
        return _language().int1
    if isinstance(value, int):
        return _language().int32
    return _language().float32 if isinstance(value, float) else value.dtype
