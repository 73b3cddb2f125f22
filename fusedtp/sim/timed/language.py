"""The `tl` of a timed run: it counts loads, stores and matmuls; everything else only tracks shapes and addresses.

Integers of 32 and 64 bits in memory are protocol data (addresses of peers, epochs, flags, indices), so they are really
read and written. All other data is left out. A scalar access is free: the compiler keeps the value in a register, or
the access belongs to an atomic, whose latency is counted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch

from ..faults import UnsupportedKernel
from .account import Account
from .masks import Mask, broadcast
from .shapes import Shapes
from .values import Tile

LINE = 128  # bytes of a cache line


class Runtime(Protocol):
    """The interface of the engine that the language uses. Addresses are byte addresses."""

    @property
    def account(self) -> Account: ...
    @property
    def program(self) -> tuple[int, int, int]: ...
    @property
    def grid(self) -> tuple[int, int, int]: ...
    def owner(self, what: str, first: int, last: int) -> int: ...
    def read(self, addresses: Sequence[int], dtype: np.dtype) -> list[int]: ...
    def write(self, addresses: Sequence[int], dtype: np.dtype, values: Sequence[int]) -> None: ...
    def poll(self, address: int, dtype: np.dtype) -> int: ...
    def atomic(
        self,
        name: str,
        addresses: Sequence[int],
        dtype: np.dtype,
        changes: Sequence[Callable[[int], int]],
        releases: bool,
        posted: bool,
    ) -> list[int]: ...


@cache
def _integer(dtype: Any) -> np.dtype | None:
    """The numpy type of integers and pointers that are really read; None for other data."""
    if dtype.is_ptr():
        return np.dtype(np.uint64)
    if dtype.is_int() and dtype.primitive_bitwidth in (32, 64):
        return np.dtype(dtype.name)
    return None


@cache
def _names() -> dict[torch.dtype, str]:
    """Triton's names of torch dtypes."""
    same = (
        "float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64",
        "uint8", "uint16", "uint32", "uint64",
    )  # fmt: skip
    names = {getattr(torch, name): name for name in same}
    names |= {torch.bool: "int1", torch.float8_e4m3fn: "float8e4nv", torch.float8_e5m2: "float8e5"}
    return names


class Language(Shapes):
    """Replaces triton.language in a kernel that source.py made."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__()
        self._runtime = runtime

    def argument(self, value: Any) -> Any:
        """Converts an argument of a launch to the value that the kernel sees."""
        tl = self._tl
        if isinstance(value, torch.Tensor):
            return Tile((), tl.pointer_type(getattr(tl, _names()[value.dtype])), value.data_ptr())
        if isinstance(value, tl.constexpr):
            return value.value
        if isinstance(value, tuple):
            items = [self.argument(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if hasattr(value, "block_shape") and hasattr(value, "base"):
            base = self.argument(value.base)
            return Descriptor(self, base, tuple(value.shape), tuple(value.strides), tuple(value.block_shape))
        return value

    # -- programs and memory ---------------------------------------------------------------------------------------

    def program_id(self, axis: int) -> int:
        return self._runtime.program[axis]

    def num_programs(self, axis: int) -> int:
        return self._runtime.grid[axis]

    def _extent(self, what: str, pointer: Tile, mask: Any) -> tuple[int, int, int, int]:
        """(number of elements, rank, first address, last address) of an access; 0 elements: no access."""
        if not pointer.known:
            raise UnsupportedKernel(f"the address of a {what} depends on data, which a timed run does not compute")
        size = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8)
        shape = pointer.shape
        if not shape and pointer.data is None:
            first = pointer.base
            if mask is not None and not mask:
                return 0, 0, 0, 0
            return 1, self._runtime.owner(what, first, first + size), first, first
        if mask is None or mask is True:
            count = pointer.size
        elif isinstance(mask, Mask):
            shape = broadcast(shape, mask.shape)
            count = mask.count(shape)
        else:
            count = pointer.size if mask else 0
        if not count:
            return 0, 0, 0, 0
        if pointer.data is None:
            ends = [(0, n) for n in pointer.shape]
            if isinstance(mask, Mask) and mask.bounds is not None and len(mask.shape) == len(ends):
                ends = [b if n == m else (0, n) for n, m, b in zip(pointer.shape, mask.shape, mask.bounds)]
            first = pointer.base + sum(s * (e[0] if s > 0 else e[1] - 1) for s, e in zip(pointer.steps, ends))
            last = pointer.base + sum(s * (e[1] - 1 if s > 0 else e[0]) for s, e in zip(pointer.steps, ends))
        else:
            used = pointer.data
            if isinstance(mask, Mask) and mask.known:
                used = np.broadcast_to(used, shape)[np.broadcast_to(mask.dense(), shape)]
            first, last = int(used.min()), int(used.max())
        return count, self._runtime.owner(what, first, last + size), first, last

    def load(self, pointer: Any, mask: Any = None, other: Any = None, *_: Any, **options: Any) -> Any:
        if isinstance(pointer, Descriptor):
            return pointer.load(mask)
        element = pointer.dtype.element_ty
        count, rank, first, last = self._extent("load", pointer, mask)
        numpy_type = _integer(element)
        if not pointer.shape:
            if not count:
                return other if other is not None else 0
            if numpy_type is None:
                return Tile((), element, known=False)
            if options.get("volatile"):
                return self._runtime.poll(first, numpy_type)
            return self._runtime.read([first], numpy_type)[0]
        shape = pointer.shape if not isinstance(mask, Mask) else broadcast(pointer.shape, mask.shape)
        if count:
            size = max(1, element.primitive_bitwidth // 8)
            self._runtime.account.load(rank, count * size, (first, last))
        if numpy_type is None:
            return Tile(shape, element, known=False)
        self._runtime.account.met += 1
        keep = mask.dense() if isinstance(mask, Mask) else np.full(shape, count > 0)
        keep = np.broadcast_to(keep, shape)
        out = np.full(shape, other if isinstance(other, int) else 0, np.int64)
        addresses = np.broadcast_to(pointer.dense(), shape)[keep].tolist()
        out[keep] = self._runtime.read(addresses, numpy_type)
        return Tile(shape, element, data=out)

    def store(self, pointer: Any, value: Any, mask: Any = None, *_: Any, **__: Any) -> None:
        if isinstance(pointer, Descriptor):
            return pointer.store(value, mask)
        element = pointer.dtype.element_ty
        count, rank, first, _last = self._extent("store", pointer, mask)
        if not count:
            return None
        numpy_type = _integer(element)
        if not pointer.shape:
            if numpy_type is not None:
                self._runtime.account.met += 1
                self._runtime.write([first], numpy_type, [int(value)])
            return None
        self._runtime.account.store(rank, count * max(1, element.primitive_bitwidth // 8))
        if numpy_type is not None and getattr(value, "known", True):
            self._runtime.account.met += 1
            shape = pointer.shape if not isinstance(mask, Mask) else broadcast(pointer.shape, mask.shape)
            keep = np.broadcast_to(mask.dense(), shape) if isinstance(mask, Mask) else np.full(shape, True)
            values = np.broadcast_to(value.dense() if isinstance(value, (Tile, Mask)) else value, shape)
            addresses = np.broadcast_to(pointer.dense(), shape)[keep].tolist()
            self._runtime.write(addresses, numpy_type, values[keep].tolist())
        return None

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: Sequence[Any], dtype: Any = None, *_: Any, **__: Any
    ) -> Any:
        """Counts only prefetches and multimem, whose last argument is the mask of active lanes, one word per lane.

        Other PTX without arguments, such as a read of the clock, returns 0, so no wait times out. With arguments it
        returns unknown values. Raises UnsupportedKernel for other memory accesses: flags they set or poll would stay 0.
        """
        if asm.startswith("prefetch.global.L2"):
            self._runtime.account.prefetch(LINE * args[0].size)
            return 0
        found = re.search(r"multimem\.(ld_reduce|st)\.\S*?v(\d)\.\w*?(16x2|32)\b", asm)
        if found is None:
            if re.search(r"(?<![.\w%])(ld|ldu|st|atom|red|cp|multimem)\.", asm):
                said = "a timed run does not support inline PTX that accesses memory"
                raise UnsupportedKernel(f"{said}: {asm.strip()!r}")
            shape = np.broadcast_shapes(*(each.shape for each in args if isinstance(each, (Tile, Mask))))
            made = [Tile(shape, t, known=False) for t in (dtype if isinstance(dtype, tuple) else (dtype,))]
            return (tuple(made) if isinstance(dtype, tuple) else made[0]) if args else 0
        mask = args[-1]
        lanes = int(np.count_nonzero(mask.dense())) if isinstance(mask, Tile) else int(mask)
        nbytes, unknown = 4 * int(found[2]) * lanes, Tile(mask.shape, self._tl.int32, known=False)
        if found[1] == "st":
            self._runtime.account.store(None, nbytes)
            return unknown
        self._runtime.account.sum(nbytes)
        return (unknown,) * constraints.count("=")

    def dot(self, a: Tile, b: Tile, acc: Any = None, input_precision: Any = None, **_: Any) -> Tile:
        *batch, m, k = a.shape
        n = b.shape[-1]
        name = a.dtype.name
        if name == "fp32" and input_precision in (None, "tf32", "tf32x3"):
            name = "tf32"
        name = "fp8" if name.startswith("fp8") else name
        self._runtime.account.dot(name, 2 * math.prod(batch) * m * n * k)
        dtype = acc.dtype if isinstance(acc, Tile) else self._tl.float32
        return Tile((*batch, m, n), dtype, known=False)

    def make_tensor_descriptor(self, base: Tile, shape: Any, strides: Any, block_shape: Any, **_: Any) -> Descriptor:
        return Descriptor(self, base, tuple(shape), tuple(strides), tuple(block_shape))

    # -- atomics ---------------------------------------------------------------------------------------------------

    def _atomic(self, name: str, pointer: Tile, value: Any, change: Callable, mask: Any, options: dict) -> Any:
        releases = (options.get("sem") or "acq_rel") in ("release", "acq_rel")
        posted = bool(options.get("_posted"))
        element = pointer.dtype.element_ty
        numpy_type = _integer(element)
        if pointer.shape and numpy_type is not None:
            return self._atomic_tile(name, pointer, value, change, mask, releases, posted)
        count, rank, first, _last = self._extent(f"atomic_{name}", pointer, mask)
        if pointer.shape:
            self._runtime.account.store(rank, count * max(1, element.primitive_bitwidth // 8))
            return Tile(pointer.shape, element, known=False)
        if numpy_type is None:
            return Tile((), element, known=False)
        if not count:
            return 0
        one = partial(_swapped, change, value)
        return self._runtime.atomic(name, [first], numpy_type, [one], releases, posted)[0]

    def _atomic_tile(
        self, name: str, pointer: Tile, value: Any, change: Callable, mask: Any, releases: bool, posted: bool
    ) -> Tile:
        """An atomic on a tile of integers; its words may belong to several ranks."""
        element = pointer.dtype.element_ty
        shape = broadcast(pointer.shape, mask.shape) if isinstance(mask, Mask) else pointer.shape
        values = np.broadcast_to(value.dense() if isinstance(value, Tile) else value, shape)
        keep = np.broadcast_to(mask.dense() if isinstance(mask, Mask) else mask is None or bool(mask), shape)
        out = np.zeros(shape, np.int64)
        if keep.any():
            addresses = np.broadcast_to(pointer.dense(), shape)[keep].tolist()
            changes = [partial(_swapped, change, one) for one in values[keep].tolist()]
            numpy_type = _integer(element)
            assert numpy_type is not None
            out[keep] = self._runtime.atomic(name, addresses, numpy_type, changes, releases, posted)
        return Tile(shape, element, data=out)

    def atomic_add(self, pointer: Any, value: Any, mask: Any = None, **o: Any) -> Any:
        return self._atomic("add", pointer, value, lambda old, v: old + v, mask, o)

    def atomic_xchg(self, pointer: Any, value: Any, mask: Any = None, **o: Any) -> Any:
        return self._atomic("xchg", pointer, value, lambda old, v: v, mask, o)

    def atomic_max(self, pointer: Any, value: Any, mask: Any = None, **o: Any) -> Any:
        return self._atomic("max", pointer, value, max, mask, o)

    def atomic_min(self, pointer: Any, value: Any, mask: Any = None, **o: Any) -> Any:
        return self._atomic("min", pointer, value, min, mask, o)

    def atomic_and(self, pointer: Any, value: Any, mask: Any = None, **o: Any) -> Any:
        return self._atomic("and", pointer, value, lambda old, v: old & v, mask, o)

    def atomic_or(self, pointer: Any, value: Any, mask: Any = None, **o: Any) -> Any:
        return self._atomic("or", pointer, value, lambda old, v: old | v, mask, o)

    def atomic_cas(self, pointer: Any, expected: Any, value: Any, **o: Any) -> Any:
        return self._atomic("cas", pointer, value, lambda old, v: v if old == expected else old, None, o)

    def atomic_load(self, pointer: Any, mask: Any = None, **o: Any) -> Any:
        return self._atomic("load", pointer, 0, lambda old, v: old, mask, o)

    def atomic_store(self, pointer: Any, value: Any, mask: Any = None, **o: Any) -> None:
        self._atomic("store", pointer, value, lambda old, v: v, mask, {**o, "_posted": True})

    def atomic_poll(self, pointer: Any, expected: Any, *_: Any, **o: Any) -> bool:
        while self.atomic_load(pointer, **{k: v for k, v in o.items() if k in ("sem", "scope")}) != expected:
            pass
        return True


class Descriptor:
    """A tensor descriptor: blocks of a strided tensor, clipped at its bounds."""

    def __init__(
        self,
        language: Language,
        base: Tile,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        block_shape: tuple[int, ...],
    ) -> None:
        self._language = language
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.dtype = base.dtype.element_ty

    def _block(self, offsets: Sequence[int]) -> tuple[Tile, Mask]:
        size = max(1, self.dtype.primitive_bitwidth // 8)
        base = self.base.base + size * sum(o * s for o, s in zip(offsets, self.strides, strict=True))
        pointer = Tile(self.block_shape, self.base.dtype, base, tuple(size * s for s in self.strides))
        bounds = tuple(
            (min(b, max(0, -o)), max(0, min(b, n - o)))
            for o, n, b in zip(offsets, self.shape, self.block_shape, strict=True)
        )
        return pointer, Mask(self.block_shape, bounds)

    def load(self, offsets: Sequence[int]) -> Tile:
        pointer, mask = self._block(offsets)
        return self._language.load(pointer, mask)

    def store(self, offsets: Sequence[int], value: Any) -> None:
        pointer, mask = self._block(offsets)
        self._language.store(pointer, value, mask)


def _swapped(change: Callable[[int, int], int], value: int, old: int) -> int:
    return change(old, value)
