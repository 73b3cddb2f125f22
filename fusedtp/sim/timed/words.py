"""The memory that a timed run really touches: flags, epochs, addresses, indices; and whose an address is."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ..case import Copy, Launch, Run
from ..memory import Allocation, Map


@cache
def _word(dtype: np.dtype) -> Any:
    return np.ctypeslib.as_ctypes_type(dtype)


class Words:
    """All allocations that a run names. Big ones are never touched, so they cost no memory."""

    def __init__(self, run: Run) -> None:
        self._map = Map()
        for memory in run.memory:
            for rank, tensor in enumerate(memory.tensors):
                self._map.add(memory.name, rank, tensor)
        for rank, work in enumerate(run.work):
            for item in work:
                if isinstance(item, Launch):
                    for name, value in item.args.items():
                        self._map.add_arguments(name, rank, value)
                elif isinstance(item, Copy):
                    self._map.add("copied to", rank, item.dst)
                    self._map.add("copied from", rank, item.src)
                else:
                    self._map.add("flag", rank, item.flag)
        self._map.freeze()
        self._sorted = self._map.allocations
        self._bases = [a.base for a in self._sorted]

    def find(self, first: int, last: int) -> Allocation | None:
        """The allocation that holds the bytes from `first` up to `last`."""
        at = bisect.bisect_right(self._bases, first) - 1
        if at < 0 or last > self._bases[at] + self._sorted[at].nbytes:
            return None
        return self._sorted[at]

    def nearest(self, address: int) -> str:
        return self._map.nearest(address)

    def name(self, address: int) -> tuple[str, tuple[int, ...]]:
        """Words for an address: tensor and rank, index."""
        a = self.find(address, address + 1)
        if a is None:
            return f"{address:#x} ", ()
        return f"{a.name} of rank {a.rank} ", a.index_of(a.place + address - a.base)

    @staticmethod
    def read(addresses: Sequence[int], dtype: np.dtype) -> list[int]:
        word = _word(dtype)
        return [word.from_address(a).value for a in addresses]

    @staticmethod
    def write(addresses: Sequence[int], dtype: np.dtype, values: Sequence[int]) -> None:
        """Values wrap at the word's size."""
        word = _word(dtype)
        for address, value in zip(addresses, values, strict=True):
            word.from_address(address).value = value
