"""The memory of a simulated world: named allocations, and where an address lies among them.

Every tensor that a kernel may touch is an allocation with a name and a rank. Addresses are the tensors' own: one that
runs out of its tensor far enough to land in another, past the guards of `symmetric`, is taken for an access to that
other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

GUARD = 1 << 16  # bytes
LINE = 128  # tensors begin at a multiple of it, modulo which an address keeps its place
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Memory:
    """One tensor a rank that kernels reach by address: symmetric memory, flags, scratch.

    tensors   one a rank, CPU, contiguous
    poisoned  not written yet: reading an element before a store to it is a fault
    """

    name: str
    tensors: tuple[Tensor, ...]
    poisoned: bool = False

    @property
    def pointers(self) -> Tensor:
        """int64 [W]: the addresses, as a kernel takes them."""
        return torch.tensor([t.data_ptr() for t in self.tensors], dtype=torch.int64)

    @cached_property
    def _window(self) -> Array:
        """Addresses that nothing else has; nobody reads or writes there."""
        return np.empty(self.nbytes + 2 * GUARD, np.uint8)

    @property
    def nbytes(self) -> int:
        """Of one rank's."""
        return self.tensors[0].numel() * self.tensors[0].element_size()

    @property
    def multicast(self) -> int:
        """The address by which multimem instructions reach this memory of all ranks at once."""
        first = int(self._window.ctypes.data)
        return first + GUARD - first % LINE

    @property
    def has_multicast(self) -> bool:
        """Whether somebody asked for that address."""
        return "_window" in self.__dict__


def symmetric(
    name: str,
    world_size: int,
    shape: Iterable[int],
    dtype: torch.dtype = torch.float32,
    *,
    poisoned: bool = True,
) -> Memory:
    """Memory of the same shape on every rank; every byte 0xFF (NaN for floats) where poisoned, else zero.

    A guard on both sides of each tensor keeps out-of-bounds accesses out of other tensors.
    """
    fill = 0xFF if poisoned else 0
    shape = tuple(shape)
    size = int(np.prod(shape)) * dtype.itemsize
    tensors = []
    for _ in range(world_size):
        inside = np.empty(size + 2 * GUARD, np.uint8)[GUARD : GUARD + size]  # a storage of its own to torch
        tensors.append(torch.from_numpy(inside).fill_(fill).view(dtype).view(shape))
    return Memory(name, tuple(tensors), poisoned)


@dataclass(frozen=True)
class Allocation:
    """A tensor's bytes. place: of the first among the bytes of all tensors."""

    name: str
    rank: int
    tensor: Tensor
    poisoned: bool
    base: int
    nbytes: int
    place: int

    @property
    def label(self) -> str:
        """As reports name it."""
        return f"{self.name} of rank {self.rank}"

    def index_of(self, place: int) -> tuple[int, ...]:
        """The element that holds this byte, as an index of the tensor (of its storage if strided)."""
        element = (place - self.place) // self.tensor.element_size()
        if not self.tensor.is_contiguous() or self.tensor.dim() == 0:
            return (element,)
        return tuple(int(i) for i in np.unravel_index(element, tuple(self.tensor.shape)))


class Map:
    """All allocations of one schedule. The first registration of an address wins; views add nothing."""

    def __init__(self) -> None:
        self._found: dict[int, Allocation] = {}
        self.size = 0
        self.multicasts: list[
            tuple[int, int, list[int]]
        ] = []  # address, bytes, addresses of the ranks' tensors
        self._sorted: list[Allocation] = []
        self._bases = self._ends = np.zeros(0, np.int64)

    def add(self, name: str, rank: int, tensor: Tensor, poisoned: bool = False) -> None:
        """Register the storage behind `tensor`, unless it is known."""
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{name} of rank {rank} is on {tensor.device}; the simulator works on CPU tensors"
            )
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in self._found:
            return
        whole = tensor
        if tensor.numel() * tensor.element_size() != storage.nbytes() or not tensor.is_contiguous():
            whole = torch.empty(0, dtype=tensor.dtype).set_(
                storage, 0, (storage.nbytes() // tensor.element_size(),), (1,)
            )
        self._found[storage.data_ptr()] = Allocation(
            name, rank, whole, poisoned, storage.data_ptr(), storage.nbytes(), self.size
        )
        self.size += storage.nbytes()

    def add_multicast(self, memory: Memory) -> None:
        """Its multicast address, where somebody asked for it."""
        if memory.has_multicast:
            bases = [tensor.data_ptr() for tensor in memory.tensors]
            self.multicasts.append((memory.multicast, memory.nbytes, bases))

    def add_arguments(self, name: str, rank: int, value: Any) -> None:
        """Register every tensor in an argument of a kernel, tuples and named tuples included."""
        if isinstance(value, Tensor):
            self.add(name, rank, value)
        elif isinstance(value, tuple):
            fields = getattr(value, "_fields", range(len(value)))
            for key, item in zip(fields, value, strict=True):
                self.add_arguments(f"{name}.{key}" if isinstance(key, str) else f"{name}[{key}]", rank, item)
        elif hasattr(value, "base") and isinstance(value.base, Tensor):  # a TensorDescriptor
            self.add(name, rank, value.base)

    def freeze(self) -> None:
        """After the last `add`. Tables of addresses get names that tell them from the memory that they point to."""
        self._sorted = sorted(self._found.values(), key=lambda a: a.base)
        self._bases = np.array([a.base for a in self._sorted], np.int64)
        self._ends = np.array([a.base + a.nbytes for a in self._sorted], np.int64)
        self._sorted = [replace(a, name=self._name_of_table(a)) for a in self._sorted]

    def _name_of_table(self, a: Allocation) -> str:
        """`boxes (table of box)` where all that the tensor holds are addresses of allocations."""
        if a.tensor.dtype != torch.int64 or a.poisoned:
            return a.name
        held = a.tensor.flatten()
        targets: dict[str, None] = {}
        for part in held.split(64):  # most are no table, which the first of them shows
            address = part.numpy()
            at = np.searchsorted(self._bases, address, side="right") - 1
            if ((at < 0) | (address >= self._ends[at])).any():
                return a.name
            targets |= dict.fromkeys(self._sorted[i].name for i in at.tolist())
        return f"{a.name} (table of {', '.join(targets)})"

    @property
    def allocations(self) -> list[Allocation]:
        """Sorted by address."""
        return self._sorted

    def nearest(self, address: int) -> str:
        """Words for an address outside: how far past which allocation."""
        if not self._sorted:
            return f"address {address:#x}; the case names no memory"
        best = min(self._sorted, key=lambda a: min(abs(address - a.base), abs(address - a.base - a.nbytes)))
        if address >= best.base:
            return f"{address - best.base - best.nbytes + 1} bytes past the end of {best.label}"
        return f"{best.base - address} bytes before {best.label}"
