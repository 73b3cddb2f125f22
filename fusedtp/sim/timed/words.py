"""The memory that a timed run really accesses (flags, epochs, addresses, indices), and the owners of addresses."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ..case import Run, memory_map
from ..memory import Allocation


@cache
def _word(dtype: np.dtype) -> Any:
    return np.ctypeslib.as_ctypes_type(dtype)


class Words:
    """All allocations that a run names. Large ones are never touched, so they cost no physical memory."""

    def __init__(self, run: Run) -> None:
        self._map = memory_map(run)
        self._sorted = self._map.allocations
        self._bases = [a.base for a in self._sorted]

    def find(self, first: int, last: int) -> Allocation | None:
        """The allocation that holds the bytes from `first` up to `last`, or the first of several adjacent ones."""
        found = at = bisect.bisect_right(self._bases, first) - 1
        while 0 <= at < len(self._bases) and self._bases[at] <= first:
            if last <= self._sorted[at].end:
                return self._sorted[found]
            at, first = at + 1, self._sorted[at].end
        return None

    def nearest(self, address: int) -> str:
        return self._map.nearest(address)

    def name(self, address: int) -> tuple[str, tuple[int, ...]]:
        """The label and the element index of an address."""
        a = self.find(address, address + 1)
        if a is None:
            return f"{address:#x}", ()
        return a.label, a.index_of(address - a.base)

    @staticmethod
    def read(addresses: Sequence[int], dtype: np.dtype) -> list[int]:
        word = _word(dtype)
        return [word.from_address(a).value for a in addresses]

    @staticmethod
    def write(addresses: Sequence[int], dtype: np.dtype, values: Sequence[int]) -> None:
        """Values wrap at the size of a word."""
        word = _word(dtype)
        for address, value in zip(addresses, values, strict=True):
            word.from_address(address).value = value
