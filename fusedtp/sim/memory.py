"""The memory of a simulated world: named allocations, and the lookup of an address among them.

Every tensor that a kernel may touch is an allocation with a name and a rank. Addresses are the real ones of the
tensors. An access that overshoots its tensor by more than the guards of `symmetric` and lands in another tensor counts
as an access to that other tensor.

Note [Slices]. Tensors of several memories may be slices of one storage, a heap. Each slice is an allocation. Bytes that
no memory names belong to the arguments in that storage. An instruction whose lanes continue from one slice into the
next is out of bounds, except in two cases: an argument spans both slices, or both belong to one memory, because with a
table of addresses the lanes of one instruction may reach the slices of several ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

GUARD = 1 << 16  # bytes
LINE = 128  # each tensor is placed so that its addresses keep their value modulo this
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Memory:
    """One tensor per rank that kernels reach by address: symmetric memory, flags, scratch.

    tensors   one per rank, on the CPU, contiguous
    poisoned  not written yet: reading an element before a store to it is a fault
    """

    name: str
    tensors: tuple[Tensor, ...]
    poisoned: bool = False

    @property
    def pointers(self) -> Tensor:
        """int64 [W]: the table of addresses to pass to a kernel."""
        return torch.tensor([t.data_ptr() for t in self.tensors], dtype=torch.int64)

    @cached_property
    def _window(self) -> Array:
        """Reserves a range of addresses; the bytes are never read or written."""
        return np.empty(self.nbytes + 2 * GUARD, np.uint8)

    @property
    def nbytes(self) -> int:
        """Size of one rank's tensor."""
        return self.tensors[0].numel() * self.tensors[0].element_size()

    @property
    def multicast(self) -> int:
        """The address by which multimem instructions reach this memory of all ranks at once."""
        first = int(self._window.ctypes.data)
        return first + GUARD - first % LINE


def symmetric(
    name: str, world_size: int, shape: Iterable[int], dtype: torch.dtype = torch.float32, *, poisoned: bool = True
) -> Memory:
    """Memory of the same shape on every rank; every byte is 0xFF (NaN for floats) if poisoned, else zero.

    A guard on both sides of each tensor keeps out-of-bounds accesses out of other tensors.
    """
    shape = tuple(shape)
    size = int(np.prod(shape)) * dtype.itemsize
    tensors = []
    for _ in range(world_size):
        inside = np.empty(size + 2 * GUARD, np.uint8)[GUARD : GUARD + size]  # torch sees a storage without guards
        tensors.append(torch.from_numpy(inside).fill_(0xFF if poisoned else 0).view(dtype).view(shape))
    return Memory(name, tuple(tensors), poisoned)


@dataclass(frozen=True)
class Allocation:
    """Bytes of a contiguous tensor: all of them, or those from byte `first` on."""

    name: str
    rank: int
    tensor: Tensor
    poisoned: bool
    base: int
    nbytes: int
    first: int = 0

    @property
    def label(self) -> str:
        """The name used in reports."""
        return f"{self.name} of rank {self.rank}"

    @property
    def end(self) -> int:
        return self.base + self.nbytes

    def index_of(self, byte: int) -> tuple[int, ...]:
        """The index of the element that holds this byte, in the tensor (in its storage if strided)."""
        element = (byte + self.first) // self.tensor.element_size()
        return tuple(int(i) for i in np.unravel_index(element, tuple(self.tensor.shape) or (1,)))


class Map:
    """All allocations of one schedule. If two tensors have the same bytes, the first one counts; views add nothing."""

    def __init__(self) -> None:
        self._slices: dict[int, list[Allocation]] = {}  # tensors of memories, by storage
        self._wholes: dict[int, Allocation] = {}  # storages of arguments, by storage
        self._spans: list[tuple[int, int]] = []  # address ranges of arguments that are not inside a slice
        self.borders: list[int] = []  # between slices; no access may cross one: Note [Slices]
        self.multicasts: list[tuple[int, int, list[int]]] = []  # address, bytes, addresses of the ranks' tensors
        self.allocations: list[Allocation] = []  # sorted by address
        self._bases = self._ends = np.zeros(0, np.int64)

    def add(self, name: str, rank: int, tensor: Tensor) -> None:
        """Register the storage of an argument, except for slices that are already registered."""
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} of rank {rank} is on {tensor.device}; the simulator works on CPU tensors")
        storage = tensor.untyped_storage()
        base, (begin, end) = storage.data_ptr(), _span(tensor)
        if any(each.base <= begin and end <= each.end for each in self._slices.get(base, ())):
            return
        self._spans.append((begin, end))
        if storage.nbytes() and base not in self._wholes:
            self._wholes[base] = _allocation(name, rank, tensor, False, base, base + storage.nbytes())

    def add_slice(self, name: str, rank: int, tensor: Tensor, poisoned: bool) -> None:
        """Register a memory's tensor, before all arguments. Raises ValueError if it overlaps another memory."""
        if tensor.device.type != "cpu" or tensor.numel() == 0:
            self.add(name, rank, tensor)
            return
        begin, end = _span(tensor)
        others = self._slices.setdefault(tensor.untyped_storage().data_ptr(), [])
        for other in others:
            if (begin, end) == (other.base, other.end):
                return
            if begin < other.end and other.base < end:
                both = f"{name} of rank {rank} overlaps {other.label} or interleaves with it"
                raise ValueError(f"{both}: pass both as one memory")
        others.append(_allocation(name, rank, tensor, poisoned, begin, end))

    def add_arguments(self, name: str, rank: int, value: Any) -> None:
        """Register every tensor in a kernel argument, including those in tuples and named tuples."""
        if isinstance(value, Tensor):
            self.add(name, rank, value)
        elif isinstance(value, tuple):
            fields = getattr(value, "_fields", range(len(value)))
            for key, item in zip(fields, value, strict=True):
                self.add_arguments(f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]", rank, item)
        elif hasattr(value, "base") and isinstance(value.base, Tensor):  # a TensorDescriptor
            self.add(name, rank, value.base)

    def freeze(self) -> None:
        """Call after the last `add`. Renames tables of addresses, to tell them from the memory that they point to."""
        found = [each for slices in self._slices.values() for each in slices]
        for base, whole in self._wholes.items():
            slices = sorted(self._slices.get(base, ()), key=lambda a: a.base)
            gaps = zip([base, *(a.end for a in slices)], [*(a.base for a in slices), whole.end])
            flat = _elements(whole.tensor, base, whole.end)
            parts = [
                replace(whole, tensor=flat, base=begin, nbytes=end - begin, first=begin - base)
                for begin, end in gaps if begin < end
            ]  # fmt: skip
            found += parts if slices else [whole]
        self.allocations = sorted(found, key=lambda a: a.base)
        self._bases = np.array([a.base for a in self.allocations], np.int64)
        self._ends = np.array([a.end for a in self.allocations], np.int64)
        touching = [b.base for a, b in pairwise(self.allocations) if a.end == b.base and a.name != b.name]
        self.borders = [at for at in touching if not any(b < at < e for b, e in self._spans)]
        self.allocations = [replace(a, name=self._name_of_table(a)) for a in self.allocations]

    def _name_of_table(self, a: Allocation) -> str:
        """`boxes (table of box)` if all elements of the tensor are addresses of allocations, else its own name."""
        if a.tensor.dtype != torch.int64 or a.poisoned:
            return a.name
        held = a.tensor.flatten()[a.first // 8 : (a.first + a.nbytes) // 8]
        targets: dict[str, None] = {}
        for part in held.split(64):  # the first part already rules out most tensors
            address = part.numpy()
            at = np.searchsorted(self._bases, address, side="right") - 1
            if ((at < 0) | (address >= self._ends[at])).any():
                return a.name
            targets |= dict.fromkeys(self.allocations[i].name for i in at.tolist())
        return f"{a.name} (table of {', '.join(targets)})"

    def nearest(self, address: int) -> str:
        """Describes an address outside every allocation by its distance from the nearest one.

        It may be far away because the run does not name the memory that it belongs to.
        """
        if not self.allocations:
            return f"address {address:#x}; the case names no memory"
        # an address at the border of two slices counts as past the end of the first
        best = min(self.allocations, key=lambda a: (min(abs(address - a.base), abs(address - a.end)), a.base))
        past = address >= best.base
        away = address - best.end + 1 if past else best.base - address
        said = f"{away} bytes {'past the end of' if past else 'before'} {best.label}"
        if away <= GUARD:
            return said
        return f"{said}, in no memory of the run: Run(memory=...) may lack a tensor that its kernels reach by address"


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of the first byte of a tensor and of the byte past its last one."""
    begin, size = tensor.data_ptr(), tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * size


def _allocation(name: str, rank: int, tensor: Tensor, poisoned: bool, begin: int, end: int) -> Allocation:
    """The allocation of a range of a tensor's storage; flat unless the tensor is exactly this range, contiguous."""
    whole = tensor.is_contiguous() and _span(tensor) == (begin, end)
    return Allocation(name, rank, tensor if whole else _elements(tensor, begin, end), poisoned, begin, end - begin)


def _elements(tensor: Tensor, begin: int, end: int) -> Tensor:
    """The elements of a tensor's storage between two addresses."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    first, count = (begin - storage.data_ptr()) // size, (end - begin) // size
    return torch.empty(0, dtype=tensor.dtype).set_(storage, first, (count,), (1,))
