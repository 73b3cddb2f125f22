"""Functions of `tl` that access no memory: shapes, integers and hints. Results of float arithmetic are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..faults import UnsupportedKernel
from .masks import Mask
from .scalars import converted
from .values import Tile, elementwise, transpose, unknown_like

PASSED = ("constexpr", "pointer_type", "block_type", "dtype", "tensor", "tuple", "const", "void")
UNKNOWN = (
    "abs", "ceil", "clamp", "cos", "div_rn", "erf", "exp", "exp2", "fdiv", "floor", "fma", "log", "log2", "rand",
    "randn", "rsqrt", "sigmoid", "sin", "softmax", "sqrt", "sqrt_rn", "tanh", "umulhi",
)  # fmt: skip


class Shapes:
    """The part of a kernel's `tl` that needs no engine."""

    def __init__(self) -> None:
        import triton.language as tl

        self._tl = tl
        self.math = self.extra = self
        for name in UNKNOWN:
            setattr(self, name, _left_out)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tl, name, None)
        if isinstance(value, self._tl.dtype) or name in PASSED:
            setattr(self, name, value)  # cached: accessed often
            return value
        raise UnsupportedKernel(f"a timed run does not support tl.{name}")

    @staticmethod
    def static_range(*bounds: int, **_: Any) -> range:
        return range(*bounds)

    range = static_range

    def arange(self, start: int, end: int) -> Tile:
        return Tile((end - start,), self._tl.int32, start, (1,))

    def full(self, shape: Any, value: Any, dtype: Any) -> Any:
        shape = tuple(int(n) for n in shape)
        if not shape:
            return value
        if dtype.is_floating() or not isinstance(value, (int, bool)):
            return Tile(shape, dtype, known=False)
        return Tile(shape, dtype, int(value), (0,) * len(shape))

    def zeros(self, shape: Any, dtype: Any) -> Any:
        return self.full(shape, 0, dtype)

    def zeros_like(self, value: Any) -> Any:
        return self.full(value.shape, 0, value.dtype) if isinstance(value, Tile) else 0

    def cdiv(self, a: int, b: int) -> int:
        return -(-a // b)

    def cast(self, value: Any, dtype: Any, **_: Any) -> Any:
        return converted(value, dtype)

    def reshape(self, value: Tile, *shape: Any, **_: Any) -> Tile:
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        data = value.dense().reshape(shape) if value.known else None
        return Tile(tuple(int(n) for n in shape), value.dtype, data=data, known=value.known)

    view = reshape

    def broadcast_to(self, value: Any, *shape: Any) -> Any:
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        return value + Tile(tuple(shape), self._tl.int32, 0, (0,) * len(shape))

    def expand_dims(self, value: Any, axis: int) -> Any:
        index: list[Any] = [slice(None)] * len(value.shape)
        index.insert(axis, None)
        return value[tuple(index)]

    def trans(self, value: Any, *_: Any) -> Any:
        return transpose(value)

    def permute(self, value: Tile, *order: Any) -> Tile:
        if len(order) == 1 and isinstance(order[0], (tuple, list)):
            order = tuple(order[0])
        data = value.dense().transpose(order) if value.known else None
        return Tile(tuple(value.shape[axis] for axis in order), value.dtype, data=data, known=value.known)

    def split(self, value: Tile) -> tuple[Tile, Tile]:
        left, right = (
            Tile(
                value.shape[:-1],
                value.dtype,
                data=value.dense()[..., i] if value.known else None,
                known=value.known,
            )
            for i in range(2)
        )
        return left, right

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        if not isinstance(condition, (Mask, Tile)):
            return a if condition else b
        same = isinstance(a, Tile) and a.shape == condition.shape
        if same and isinstance(condition, Mask) and condition.everywhere:
            return a
        if not condition.known or any(isinstance(v, float) or not getattr(v, "known", True) for v in (a, b)):
            return unknown_like(condition, a, b)
        c = condition.dense().astype(bool)
        x, y = (v.dense() if isinstance(v, Tile) else v for v in (a, b))
        dtype = a.dtype if isinstance(a, Tile) else b.dtype if isinstance(b, Tile) else self._tl.int32
        out = np.where(c, x, y)
        return Tile(out.shape, dtype, data=out)

    def minimum(self, a: Any, b: Any, **_: Any) -> Any:
        if isinstance(a, Tile) or isinstance(b, Tile):
            return elementwise(np.minimum, a, b)
        return min(a, b)

    def maximum(self, a: Any, b: Any, **_: Any) -> Any:
        if isinstance(a, Tile) or isinstance(b, Tile):
            return elementwise(np.maximum, a, b)
        return max(a, b)

    def _reduced(self, function: Callable, value: Any, axis: int | None, keep_dims: bool) -> Any:
        shape = value.shape
        axes = tuple(range(len(shape))) if axis is None else (axis % len(shape),)
        kept = tuple(1 if d in axes else n for d, n in enumerate(shape) if keep_dims or d not in axes)
        if not value.known or (isinstance(value, Tile) and value.dtype.is_floating()):
            return Tile(kept, value.dtype, known=False)
        out = np.asarray(function(value.dense().astype(np.int64), axis=axes)).reshape(kept)
        return Tile(kept, value.dtype, data=out) if kept else int(out)

    def sum(self, value: Any, axis: int | None = None, keep_dims: bool = False, **_: Any) -> Any:
        return self._reduced(np.sum, value, axis, keep_dims)

    def max(self, value: Any, axis: int | None = None, keep_dims: bool = False, **_: Any) -> Any:
        return self._reduced(np.max, value, axis, keep_dims)

    def min(self, value: Any, axis: int | None = None, keep_dims: bool = False, **_: Any) -> Any:
        return self._reduced(np.min, value, axis, keep_dims)

    def cumsum(self, value: Any, axis: int = 0, **_: Any) -> Any:
        if not value.known:
            return Tile(value.shape, value.dtype, known=False)
        return Tile(value.shape, value.dtype, data=np.cumsum(value.dense(), axis=axis))

    # -- hints -----------------------------------------------------------------------------------------------------

    def multiple_of(self, value: Any, *_: Any) -> Any:
        return value

    max_contiguous = max_constancy = multiple_of

    def assume(self, *_: Any) -> None: ...

    debug_barrier = static_print = device_print = device_assert = assume

    def static_assert(self, condition: bool, message: str = "") -> None:
        assert condition, message


def _left_out(*values: Any, **_: Any) -> Any:
    """A function of floating point data; the result is not computed."""
    return unknown_like(*values)
