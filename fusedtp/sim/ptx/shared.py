"""Who accessed each piece of a program's shared memory last: accesses that nothing orders, and missing proxy fences.

Two warps race where one reads what the other writes, and no edge of clocks.py leads from the one to the other. Lanes of
a warp do not race here, nor do two writes, as threads may store copies of a value; a thread that reads what its own
warp wrote too reads such a copy. Strong accesses and atomics count as a barrier of all threads: rather a fault too few
than a false alarm. Two copies race that are under way to one place.

wgmma and copies by TMA access shared memory by the async proxy; ld, st, ldmatrix, stmatrix, atomics and cp.async by the
generic one. A fence.proxy.async has to stand between a generic write and an access by the async proxy, and between a
generic read and a write by TMA (PTX ISA 9.7.13.4; 9.7.15, Async Proxy; so does Triton's pass ProxyFenceInsertion): by
the thread of the generic one, or by another one after threads have met at a barrier, in a warp or by an mbarrier. In
the machine no value is wrong without it. So what accesses by the async proxy looks whether one is missing.

Note [Stamps]: of every cell, of as many bytes as the smallest access, the last read and the last write by each warp
leave a stamp: the tick, the number of its event, whether it wants a fence, and the thread. TMA writes as a thread and a
warp of its own, behind the program's. Accesses leave stamps late, when somebody looks: mostly all threads have met
since, and nobody has to.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from ..faults import Site
from .access import SHARED
from .clocks import GENERIC
from .shadow import Event

Array = np.ndarray[Any, Any]
Window = Any  # that of memory.py
Copies = Callable[[], Array] | None  # which threads [n, 1] store what stands there
# Triton 3.6 puts no fence between cp.async and wgmma, and its kernels run right on an H100; 3.9 does.
FENCES_COPIES = tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
READ, WRITE = 0, 1
THREADS, UNFENCED, EVENT, EVENTS, TICK = (1 << 11) - 1, 1 << 11, 12, (1 << 28) - 1, 40  # of a stamp
MOST_LOGGED = 512


class SharedShadow:
    """Of a program's shared memory, of so many bytes, by its threads. grain: bytes of a cell, at most 4.

    ordered   what happened up to this tick happened before all that any thread does
    covered   a fence covers what happened up to this tick, whoever did it; fenced: of a thread, what it did itself
    copying   of each cell the copy that is under way to it: the number of its event, or 0
    """

    def __init__(self, window: Window, nbytes: int, threads: int, grain: int = 4) -> None:
        self.window, self.known, self.shift, size = window, window.known, grain.bit_length() - 1, nbytes // grain + 32
        self.last, self.copying = np.zeros((2, threads // 32 + 1, size), np.int64), np.zeros(size, np.int32)
        self.fenced, self.steps, self.engine = np.zeros(threads, np.int64), np.arange(32), np.array([threads])
        self.ordered = self.met = self.covered = 0
        self.newest = [0, 0]  # ticks of the last accesses, by kind
        self.log: list[tuple[int, Array, Array]] = []  # kind, stamps, cells of accesses that have left no stamps yet

    def cells(self, at: Array, nbytes: int) -> Array:
        """[n, k], of nbytes bytes at [n] addresses."""
        cells: Array = at[:, None] >> self.shift
        return cells if nbytes >> self.shift <= 1 else cells + self.steps[: nbytes >> self.shift]

    def touch(
        self, kind: int, at: Array, nbytes: int, threads: Array, what: str, site: Site, strong: bool = False,
        copies: Copies = None,
    ) -> None:  # fmt: skip
        """Threads [n] read or write nbytes bytes at [n] addresses. strong: or by an atomic."""
        cells = self.cells(at, nbytes)
        if strong:
            self.meet(everyone=True)
        self.follow(1 - kind, cells, threads, what, site, copies=copies)
        self.note(kind, cells, threads, what, site)

    def touch_async(self, kind: int, cells: Array, threads: Array, what: str, site: Site) -> None:
        """The async proxy, for these threads, reads or writes cells [1, n], soon."""
        self.follow(1 - kind, cells, threads, what, site)
        for before in (WRITE, READ)[: 1 + kind]:
            if self.lacking(before, cells):
                did, place = ("read from", "wrote to")[before], int(cells.min()) << self.shift
                said = f"between this and what threads {did} shared memory there, a fence.proxy.async is missing"
                raise self.window.fault("missing proxy fence", said, what, site, SHARED, (place,))

    def begin_copy(self, cells: Array, what: str, site: Site) -> None:
        """It is under way to these cells from now on, until `end_copy`."""
        under_way, event = self.copying[cells], Event(self.window.where, site, what, True)
        if under_way.any():
            self._race(under_way, cells, under_way > 0, event)
        self.copying[cells] = self.window.line.event(event)

    def end_copy(self, cells: Array, threads: Array, what: str, site: Site, begun: int, by_tma: bool) -> None:
        """begun: the tick when it began."""
        self.copying[cells] = 0
        self.follow(READ, cells, threads, what, site, begun)
        if by_tma or not FENCES_COPIES:  # what was written there before, and wants a fence, is gone
            self._settle()
            self.last[:, :, cells] = 0
        self.note(WRITE, cells, self.engine if by_tma else threads, what, site, FENCES_COPIES and not by_tma)

    def follow(
        self, kind: int, cells: Array, threads: Array, what: str, site: Site, begun: int = 0, copies: Copies = None
    ) -> None:
        """Raises where another warp's last access of this kind is not ordered before that of these threads now.

        begun   of a copy at its end: what has happened since that tick races
        """
        least = begun or self.ordered + 1
        if self.newest[kind] < least:
            return
        self._settle()
        warps = threads[:, None] >> 5
        for warp, last in enumerate(self.last[kind]):
            stamps = last[cells]
            late = (stamps >= least << TICK) & (warps != warp)
            if kind == WRITE:
                late &= self.last[WRITE, warps, cells] < least << TICK
            if late.any() and not begun:
                by = self.known.first + (stamps & THREADS)
                late &= self.known.ticks(self.known.now(), threads, by, GENERIC) < stamps >> TICK
            if late.any() and copies is not None:
                late &= ~copies()
            if late.any():
                event = Event(self.window.where, site, what, kind == READ)
                self._race(stamps >> EVENT & EVENTS, cells, late, event)

    def _race(self, events: Array, cells: Array, racing: Array, now: Event) -> None:
        one = int(np.argmax(racing))
        self.window.race_in(SHARED, int(events.flat[one]), int(cells.flat[one]) << self.shift, now)

    def note(self, kind: int, cells: Array, threads: Array, what: str, site: Site, unfenced: bool = True) -> None:
        """Threads [n] access cells [n, k], or each all of [1, k]. unfenced: by the generic proxy."""
        self.newest[kind] = tick = self.known.slot.tick
        event = self.window.line.event(Event(self.window.where, site, what, kind == WRITE))
        self.log.append((kind, threads + ((tick << TICK) + (event << EVENT) + UNFENCED * unfenced), cells))
        if len(self.log) == MOST_LOGGED:
            self._settle()

    def _settle(self) -> None:
        for kind, stamps, cells in self.log:
            self.last[kind, (stamps & THREADS)[:, None] >> 5, cells] = stamps[:, None]
        self.log.clear()

    def meet(self, everyone: bool = False) -> None:
        """Threads of the program have met. It is not asked which, but for whether it was everyone."""
        self.met = self.known.over()
        if everyone:
            self.ordered = self.met

    def fence(self, threads: Array) -> None:
        self.fenced[threads] = self.known.over()
        self.covered = max(self.covered, self.met, int(self.fenced.min()))

    def lacking(self, kind: int, cells: Array) -> bool:
        """Whether a fence is missing behind a generic read, or write, of one of them."""
        if self.newest[kind] <= self.covered:
            return False
        self._settle()
        stamps = self.last[kind][:, cells]
        stamps = stamps[(stamps & UNFENCED != 0) & (stamps >> TICK > self.covered)]
        return bool((stamps >> TICK > self.fenced[stamps & THREADS]).any())
