"""The last accesses to each piece of a program's shared memory: finds races and missing proxy fences.

Two warps race if one reads what the other writes and no edge of clocks.py orders them. Lanes of a warp do not race
here. Two writes do not race either, because threads may store copies of one value; a thread whose own warp also wrote
the cell reads such a copy. Strong accesses and atomics count as a barrier of all threads: this may miss a fault, but
raises no false alarm. Two copies race if both are in flight to the same place.

wgmma and TMA copies access shared memory through the async proxy; ld, st, ldmatrix, stmatrix, atomics and cp.async
through the generic proxy. A fence.proxy.async is required between a generic write and an async-proxy access, and
between a generic read and a TMA write (PTX ISA 9.7.13.4; 9.7.15, Async Proxy; Triton's pass ProxyFenceInsertion inserts
the same). The thread of the generic access may execute it, or another thread after both met at a barrier, in a warp or
by an mbarrier. The machine computes the right values without it, so every async-proxy access checks for the fence.

Note [Stamps]: the last read and the last write of each cell by each warp leave a stamp: the tick, the event number,
whether a fence is needed, and the thread. A cell has as many bytes as the smallest access. TMA writes count as an extra
thread and warp, after those of the program. Accesses are logged and stamped only when a check needs the stamps: mostly
all threads have met by then, and no check does.
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
Window = Any  # memory.Window
Copies = Callable[[], Array] | None  # which threads [n, 1] store the value that is already there
# Triton 3.6 inserts no fence between cp.async and wgmma, and its kernels run correctly on an H100; 3.9 inserts one.
FENCES_COPIES = tuple(map(int, version("triton").split(".")[:2])) >= (3, 9)
READ, WRITE = 0, 1
THREADS, UNFENCED, EVENT, EVENTS, TICK = (1 << 11) - 1, 1 << 11, 12, (1 << 28) - 1, 40  # fields of a stamp
MOST_LOGGED = 512


class SharedShadow:
    """The shadow of a program's shared memory. grain: bytes of a cell, at most 4.

    ordered   everything up to this tick happened before the current accesses of all threads
    covered   a fence covers every access up to this tick, by any thread; fenced: by thread, its own accesses
    copying   by cell: event number of the copy in flight to it, or 0
    """

    def __init__(self, window: Window, nbytes: int, threads: int, grain: int = 4) -> None:
        self.window, self.known, self.shift, size = window, window.known, grain.bit_length() - 1, nbytes // grain + 32
        self.last, self.copying = np.zeros((2, threads // 32 + 1, size), np.int64), np.zeros(size, np.int32)
        self.fenced, self.steps, self.engine = np.zeros(threads, np.int64), np.arange(32), np.array([threads])
        self.ordered = self.met = self.covered = 0
        self.newest = [0, 0]  # tick of the last access, by kind
        self.log: list[tuple[int, Array, Array]] = []  # kind, stamps and cells of accesses that are not stamped yet

    def cells(self, at: Array, nbytes: int) -> Array:
        """The cells [n, k] of nbytes bytes at each of [n] addresses."""
        cells: Array = at[:, None] >> self.shift
        return cells if nbytes >> self.shift <= 1 else cells + self.steps[: nbytes >> self.shift]

    def touch(
        self, kind: int, at: Array, nbytes: int, threads: Array, what: str, site: Site, strong: bool = False,
        copies: Copies = None,
    ) -> None:  # fmt: skip
        """Threads [n] read or write nbytes bytes at [n] addresses. strong: a strong access or an atomic."""
        cells = self.cells(at, nbytes)
        if strong:
            self.meet(everyone=True)
        self.follow(1 - kind, cells, threads, what, site, copies=copies)
        self.note(kind, cells, threads, what, site)

    def touch_async(self, kind: int, cells: Array, threads: Array, what: str, site: Site) -> None:
        """The async proxy will read or write cells [1, n] on behalf of these threads."""
        self.follow(1 - kind, cells, threads, what, site)
        for before in (WRITE, READ)[: 1 + kind]:
            if self.lacking(before, cells):
                did, place = ("read from", "wrote to")[before], int(cells.min()) << self.shift
                said = f"threads {did} shared memory there, with no fence.proxy.async in between"
                raise self.window.fault("missing proxy fence", said, what, site, SHARED, (place,))

    def begin_copy(self, cells: Array, what: str, site: Site) -> None:
        """A copy to these cells is in flight from now until `end_copy`."""
        under_way, event = self.copying[cells], Event(self.window.where, site, what, True)
        if under_way.any():
            self._race(under_way, cells, under_way > 0, event)
        self.copying[cells] = self.window.line.event(event)

    def end_copy(self, cells: Array, threads: Array, what: str, site: Site, begun: int, by_tma: bool) -> None:
        """The copy has landed. begun: the tick when it began."""
        self.copying[cells] = 0
        self.follow(READ, cells, threads, what, site, begun)
        if by_tma or not FENCES_COPIES:  # the copy overwrote earlier writes that need a fence
            self._settle()
            self.last[:, :, cells] = 0
        self.note(WRITE, cells, self.engine if by_tma else threads, what, site, FENCES_COPIES and not by_tma)

    def follow(
        self, kind: int, cells: Array, threads: Array, what: str, site: Site, begun: int = 0, copies: Copies = None
    ) -> None:
        """Raises if another warp's last access of this kind is not ordered before the current one of these threads.

        begun   at the end of a copy, the tick when it began: any access since then races
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
        """Threads [n] access cells [n, k], or all of them access [1, k]. unfenced: through the generic proxy."""
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
        """Threads of the program have met at a barrier. Only whether all of them met is recorded, not which."""
        self.met = self.known.over()
        if everyone:
            self.ordered = self.met

    def fence(self, threads: Array) -> None:
        self.fenced[threads] = self.known.over()
        self.covered = max(self.covered, self.met, int(self.fenced.min()))

    def lacking(self, kind: int, cells: Array) -> bool:
        """Whether a fence is missing after a generic read or write of one of these cells."""
        if self.newest[kind] <= self.covered:
            return False
        self._settle()
        stamps = self.last[kind][:, cells]
        stamps = stamps[(stamps & UNFENCED != 0) & (stamps >> TICK > self.covered)]
        return bool((stamps >> TICK > self.fenced[stamps & THREADS]).any())
