"""Masks of a timed run: the selected elements of a block, stored as a box of bounds where possible.

rows < 400, of rows 384 to 511          Mask bounds ((0, 16),)
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np

from ..faults import UnsupportedKernel

Shape = tuple[int, ...]


@cache
def triton_language() -> Any:
    import triton.language as tl

    return tl


class Mask:
    """The selected elements of a block: a box of `bounds` (low, high per axis), an array, or data-dependent."""

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
        return triton_language().int1

    def dense(self) -> np.ndarray:
        if not self.known:
            raise UnsupportedKernel("a branch depends on floating point data, which a timed run does not compute")
        if self.data is not None:
            return self.data
        assert self.bounds is not None
        out = np.zeros(self.shape, bool)
        out[tuple(slice(low, high) for low, high in self.bounds)] = True
        return out

    def count(self, shape: Shape) -> int:
        """Number of elements after broadcasting to a block of this shape. A data-dependent mask counts as all."""
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
            raise UnsupportedKernel("a branch on a block of values; the condition must be a scalar")
        return bool(self.dense().item())

    def __getitem__(self, index: Any) -> Mask:
        keep = kept_axes(index, len(self.shape))
        shape = tuple(1 if a is None else self.shape[a] for a in keep)
        bounds = None
        if self.bounds is not None:
            bounds = tuple((0, 1) if a is None else self.bounds[a] for a in keep)
        return Mask(shape, bounds, None if self.data is None else self.data.reshape(shape), self.known)

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
    """Bounds of an axis, broadcast from `own` to `wanted` elements."""
    if own == wanted:
        return bounds
    return (0, wanted) if bounds[1] > bounds[0] else (0, 0)


def kept_axes(index: Any, dims: int) -> list[int | None]:
    """The axes of a block after indexing with None and ':' only; None is a new axis."""
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
            raise UnsupportedKernel(f"a block is indexed by {i!r}; only None and ':' are supported")
    return kept + list(range(axis, dims))


@lru_cache(maxsize=4096)
def broadcast(a: Shape, b: Shape) -> Shape:
    """The broadcast shape of both."""
    if a == b:
        return a
    if len(a) < len(b):
        a, b = b, a
    extra = len(a) - len(b)
    return a[:extra] + tuple(m if n == 1 else n for n, m in zip(a[extra:], b, strict=True))
