"""Who accessed each piece of a program's shared memory last: accesses that nothing orders, and missing proxy fences.

Two warps race where one reads what the other writes, and no barrier, mbarrier or other edge of clocks.py leads from the
one to the other. Lanes of a warp do not race here, nor do two writes, as threads may store copies of a value; a thread
that reads what its own warp wrote too reads such a copy. Strong accesses and atomics of shared memory count as a
barrier of all threads: rather a fault too few than a false alarm.

wgmma and copies by TMA access shared memory by the async proxy; ld, st, ldmatrix, stmatrix, atomics and cp.async by the
generic one. A fence.proxy.async has to stand between a generic write and an access by the async proxy, and between a
generic read and a write by TMA (PTX ISA 9.7.13.4; 9.7.15, Async Proxy; so does Triton's pass ProxyFenceInsertion): by
the thread of the generic one, or by another one after threads have met at a barrier, in a warp or by an mbarrier. In
the machine no value is wrong without it. So what accesses by the async proxy looks whether one is missing.

Note [Stamps]: of every cell, of as many bytes as the smallest access, the last read and the last write by each warp
leave a stamp: the number of the access, whether it needs no fence, and the thread. Accesses leave them late, when
somebody looks: mostly all threads have met since, and nobody has to.
"""

from __future__ import annotations

from collections import deque
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from ..faults import Site
from .clocks import GENERIC, Known

Array = np.ndarray[Any, Any]
# Triton 3.6 puts no fence between cp.async and wgmma, and its kernels run right on an H100; 3.9 does.
FENCES_COPIES = tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
READ, WRITE = 0, 1
THREADS, UNFENCED, BITS = (1 << 10) - 1, 1 << 10, 11  # of a stamp; then the number
REMEMBERED = 1024  # accesses, the last ones
MOST_LOGGED = 512


class Past(NamedTuple):
    """An access as reports name it, and the tick of the program at which it happened. step: as in faults.Access."""

    tick: int
    step: int
    site: Site
    what: str


class SharedShadow:
    """Of a program's shared memory, of so many bytes, by its threads. grain: bytes of a cell, at most 4.

    count     the number of the next access; 0 is no one's
    ordered   what came before this number happened before all that any thread does
    covered   a fence covers what came before this number, whoever did it; fenced: of a thread, what it did itself
    copying   of each cell the copy that is under way to it: its number in `copies`, or 0
    """

    def __init__(self, nbytes: int, threads: int, grain: int = 4) -> None:
        self.shift = grain.bit_length() - 1
        self.last = np.zeros((2, -(-threads // 32), (nbytes >> self.shift) + 32), np.int64)
        self.copying, self.copies = np.zeros(self.last.shape[2], np.int32), list[Past]()
        self.fenced, self.steps = np.zeros(threads, np.int64), np.arange(32)
        self.count = self.ordered = self.met = self.covered = 1
        self.newest = [0, 0]  # by kind
        self.recent: deque[Past] = deque(maxlen=REMEMBERED)
        self.log: list[tuple[int, Array, Array]] = []  # kind, stamps, cells of accesses that have left no stamps yet

    def cells(self, at: Array, nbytes: int) -> Array:
        """[n, k], of nbytes bytes at [n] addresses."""
        cells: Array = at[:, None] >> self.shift
        return cells if nbytes >> self.shift <= 1 else cells + self.steps[: nbytes >> self.shift]

    def note(self, kind: int, cells: Array, threads: Array, past: Past, unfenced: bool = True) -> None:
        """Threads [n] access cells [n, k], or each all of [1, k]. unfenced: by the generic proxy."""
        self.recent.append(past)
        self.log.append((kind, threads + ((self.count << BITS) + UNFENCED * unfenced), cells))
        self.newest[kind] = self.count
        self.count += 1
        if len(self.log) == MOST_LOGGED:
            self._settle()

    def _settle(self) -> None:
        for kind, stamps, cells in self.log:
            self.last[kind, (stamps & THREADS)[:, None] >> 5, cells] = stamps[:, None]
        self.log.clear()

    def forget(self, cells: Array) -> None:
        """A copy that needs no fence has written them."""
        self._settle()
        self.last[:, :, cells] = 0

    def begin(self, cells: Array, past: Past) -> tuple[Past, int] | None:
        """A copy to these cells: another one that is under way to one of them, and its place."""
        under_way = self.copying[cells]
        self.copies.append(past)
        self.copying[cells] = len(self.copies)
        if not under_way.any():
            return None
        one = int(np.argmax(under_way))
        return self.copies[int(under_way.flat[one]) - 1], int(cells.flat[one]) << self.shift

    def meet(self, everyone: bool = False) -> None:
        """Threads of the program have met. It is not asked which, but for whether it was everyone."""
        self.met = self.count
        if everyone:
            self.ordered = self.count

    def fence(self, threads: Array) -> None:
        self.fenced[threads] = self.count
        self.covered = max(self.covered, self.met, int(self.fenced.min()))

    def lacking(self, kind: int, cells: Array) -> bool:
        """Whether the async proxy may not see that they were read, or written."""
        if self.newest[kind] < self.covered:
            return False
        self._settle()
        stamps = self.last[kind][:, cells]
        since = np.maximum(self.fenced[stamps & THREADS], self.covered)
        return bool(((stamps & UNFENCED != 0) & (stamps >> BITS >= since)).any())

    def racing(self, kind: int, cells: Array, threads: Array, known: Known, since: int = 0) -> tuple[Past, int] | None:
        """An earlier access of this kind by another warp that nothing orders before that of these threads now, and its
        place. since: number of the access that a copy was, which is at its end now: what came after it races.
        """
        least = since or self.ordered
        if self.newest[kind] < least:
            return None
        self._settle()
        warps = threads[:, None] >> 5
        for warp, last in enumerate(self.last[kind]):
            stamps = last[cells]
            late = (stamps >= least << BITS) & (warps != warp)
            if kind == WRITE:
                late &= self.last[WRITE, warps, cells] < least << BITS
            if late.any() and not since:
                by = known.first + (stamps & THREADS)
                late &= known.ticks(known.now(), threads, by, GENERIC) < self._ticks(stamps >> BITS)
            if late.any():
                one = int(np.argmax(late))
                return self.recent[int(stamps.flat[one] >> BITS) - self.count], int(cells.flat[one]) << self.shift
        return None

    def _ticks(self, numbers: Array) -> Array:
        """Of accesses; 0 of those that are not remembered."""
        ticks = np.array([0, *[past.tick for past in self.recent]])
        return ticks[np.maximum(numbers - self.count + len(ticks), 0)]
