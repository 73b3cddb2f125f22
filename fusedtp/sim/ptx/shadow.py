"""The last writer and the last readers of each piece of memory. Two accesses that clocks do not order race.

PTX ISA 8.8, section 8.7.1: two overlapping accesses race if at least one writes, causality does not order them, and
they are not morally strong, that is, both strong, to the same bytes, each with a scope that includes the other thread.

A tensor is divided into cells: 16 bytes at first, later as small as the smallest access to it. Weak accesses leave
stamps (tick, thread) in cells: the last write, and the last read by each slot of programs. Strong accesses are few;
their words store them by thread. The first race of a schedule is found exactly, with two exceptions:

    If several threads of one program read a cell, only the last reader is stored.
    Note [Loads in every thread]. A compiler loads a scalar in every thread and uses one thread's (`leave` in
    kernels/signals.py), so a thread may store to it before another warp has loaded. Within a program, a write after a
    read is not checked. If warps run one at a time, neither is a read after a write whose source line had already
    read the cell before the write. If such a race matters, warps in random order show a wrong result.

Source: Flanagan and Freund 2009, "FastTrack: Efficient and Precise Dynamic Race Detection".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..faults import Site
from .clocks import ALIAS, ASYNC, GENERIC, READONLY, Carried, Known, Rows, Source

Array = np.ndarray[Any, Any]
THREAD = (1 << 31) - 1  # mask of a stamp: tick << 32 | ALIASED | coordinate of the thread
ALIASED = 1 << 31  # the access used a multicast address
MOST_WRITES = 16  # stored per word


class Event(NamedTuple):
    """An access, as shown in reports. where: rank, launch, program."""

    where: tuple[int, str, int]
    site: Site
    what: str
    writes: bool

    def __str__(self) -> str:
        return f"the {self.what} at {self.site}"


def program_name(where: tuple[int, str, int]) -> str:
    rank, launch, program = where
    return f"rank {rank}, {launch}, program {program}"


class Conflict(NamedTuple):
    """An earlier access that races with the current one."""

    event: int
    cells: Array  # those of the current access that overlap it
    by: int  # coordinate of the earlier thread
    tick: int  # of the earlier access
    proxy: int = GENERIC  # ASYNC or ALIAS: only a fence of this proxy is missing. READONLY: no fence would help


class Accessor(NamedTuple):
    """The current access: threads of a program with their clocks, and the proxy. Makes the stamps of the access."""

    known: Known
    rows: Rows
    threads: Array
    proxy: int = GENERIC
    engine: bool = False  # the access is that of the program's asynchronous copies, once they are complete

    def stamps(self, tick: int, cells: Array) -> Array:
        """One stamp per cell, or per row of cells."""
        who = np.full(1, self.known.engine) if self.engine else self.known.first + self.threads
        stamps = who | (tick << 32) | ALIASED * (self.proxy == ALIAS)
        return stamps if cells.ndim == 1 else stamps[:, None]


class Shadow:
    """The cells of one tensor. first: its first byte on the line."""

    def __init__(self, first: int, nbytes: int, poisoned: bool) -> None:
        self.first, self.nbytes, self.shift = first, nbytes, 4
        self.begin, size = self._extent()
        self.writes, self.write_events = np.zeros(size, np.int64), np.zeros(size, np.int32)
        self.reads: dict[int, tuple[Array, Array]] = {}  # by the first coordinate of a slot: stamps, events
        self.unwritten = np.full(size, poisoned)
        self.strong = np.zeros(size, bool)  # cells that strong operations have used
        self.poisoned, self.written = poisoned, False
        self.log: list[tuple[Accessor, int, Array, int]] = []  # reads that are not stamped yet
        self.logged = 0

    def _extent(self) -> tuple[int, int]:
        begin = self.first >> self.shift
        return begin, (self.first + max(self.nbytes, 1) - 1 >> self.shift) - begin + 1

    def cells(self, places: Array, width: int) -> Array:
        """The cells that accesses of `width` bytes at these places touch: [n], or [n, k]."""
        if width < 1 << self.shift:
            self._refine(width.bit_length() - 1)
        cells = (places >> self.shift) - self.begin
        count = width >> self.shift
        return cells if count == 1 else cells[:, None] + np.arange(count)

    def places(self, cells: Array) -> Array:
        """The first byte of each cell."""
        return np.maximum((cells + self.begin) << self.shift, self.first)

    def _refine(self, shift: int) -> None:
        self._settle()
        by = self.shift - shift
        cut = (self.first >> shift) - (self.begin << by)
        self.shift = shift
        self.begin, size = self._extent()

        def finer(cells: Array) -> Array:
            return np.repeat(cells, 1 << by)[cut : cut + size]

        self.writes, self.write_events = finer(self.writes), finer(self.write_events)
        self.unwritten, self.strong = finer(self.unwritten), finer(self.strong)
        self.reads = {slot: (finer(stamps), finer(events)) for slot, (stamps, events) in self.reads.items()}

    # -- weak accesses -----------------------------------------------------------------------------------------------

    def conflicts(
        self, who: Accessor, cells: Array, writes: bool, excused: Callable[[Array], Array] | None = None
    ) -> Iterator[Conflict]:
        """The weak accesses of other threads that race with this one, one event at a time.

        excused   for cells last written by a thread of the same program: whether that is no race. Loads: Note [Loads in
                  every thread], None in lockstep. Stores: threads may store equal values, so the value already there
        """
        lasts = [(self.writes, self.write_events, False)] if self.written else []
        if writes:
            self._settle()
            lasts += [(*last, True) for last in self.reads.values()]
        known = who.known
        for last, events, reads in lasts:
            stamps = last[cells]
            by, ticks = stamps & THREAD, stamps >> 32
            missing = {GENERIC: known.ticks(who.rows, who.threads, by, GENERIC) < ticks}
            if who.proxy == READONLY and not reads:
                missing[READONLY] = known.space.fitted(known.began)[by] < ticks
            elif who.proxy == ASYNC and not reads:
                missing[ASYNC] = known.ticks(who.rows, who.threads, by, ASYNC) < ticks
            elif known.space.proxies > ALIAS and not reads:  # between two addresses of the same memory
                across = (stamps & ALIASED != 0) != (who.proxy == ALIAS)
                missing[ALIAS] = across & (known.ticks(who.rows, who.threads, by, ALIAS) < ticks)
            if not any(map(np.count_nonzero, missing.values())):
                continue
            same = by == known.first + (who.threads if by.ndim == 1 else who.threads[:, None])
            if reads or excused is not None:
                inside = (by >= known.first) & (by < known.engine)
                if excused is not None and not reads and np.count_nonzero(inside):
                    inside &= excused(cells)
                    missing = {proxy: racing & ~inside for proxy, racing in missing.items()}
                same |= inside
            missing[GENERIC] &= ~same
            for proxy, racing in missing.items():
                while np.count_nonzero(racing):
                    numbers, one = events[cells], int(np.argmax(racing))
                    event, thread, tick = (int(each.flat[one]) for each in (numbers, by, ticks))
                    yield Conflict(event, cells[racing & (numbers == event)], thread, tick, proxy)
                    for each in missing.values():
                        each &= numbers != event

    def note(self, who: Accessor, cells: Array, writes: bool, event: int) -> None:
        """Record this access."""
        tick = who.known.slot.tick
        if writes:
            self._settle()
            self.written = True
            self.writes[cells], self.write_events[cells] = who.stamps(tick, cells), event
            if self.poisoned:
                self.unwritten[cells] = False
        else:
            self.log.append((who, tick, cells, event))
            self.logged += cells.size
            if self.written or self.logged > 4 * len(self.writes) + 4096:
                self._settle()

    def _settle(self) -> None:
        """Stamp the logged reads."""
        for who, tick, cells, event in self.log:
            if who.known.first not in self.reads:
                size = len(self.writes)
                self.reads[who.known.first] = np.zeros(size, np.int64), np.zeros(size, np.int32)
            last, events = self.reads[who.known.first]
            last[cells], events[cells] = who.stamps(tick, cells), event
        self.log.clear()
        self.logged = 0


# -- strong accesses ---------------------------------------------------------------------------------------------------


class Write(NamedTuple):
    """A write to a word: its number among all strong writes, the value, and the clocks that it carries."""

    number: int
    value: Any
    carried: Carried


class Operation(NamedTuple):
    """The last strong read or write of a word by a thread."""

    tick: int
    source: Source
    place: int
    nb: int
    event: int


class Word:
    """Bytes that strong operations use: the writes that may still be read, in coherence order, and the users.

    coordinate   coordinate in clocks: the newest write that happened before
    operations   (coordinate of a thread, whether it wrote) -> its last operation
    users        all (source, place, nb) of operations
    released     coordinate of a thread -> clocks of its last release here; its later writes carry them too (8.8)
    """

    __slots__ = ("coordinate", "nb", "operations", "place", "released", "users", "writes")

    def __init__(self, place: int, nb: int, coordinate: int, value: Any) -> None:
        self.place, self.nb, self.coordinate = place, nb, coordinate
        self.writes = deque([Write(0, value, {})], MOST_WRITES)
        self.operations: dict[tuple[int, bool], Operation] = {}
        self.users: set[tuple[Source, int, int]] = set()
        self.released: dict[int, Carried] = {}

    def at(self, number: int) -> Write:
        """The last write with at most this number."""
        return next((w for w in reversed(self.writes) if w.number <= number), self.writes[0])

    def conflicts(
        self, known: Known, at: Rows, thread: int, source: Source | None, place: int, nb: int, writes: bool
    ) -> Iterator[Operation]:
        """Strong operations of other threads that race with this access, one per event. source: None if it is weak."""
        told: set[int] = set()
        harmless = {u for u in self.users if source is not None and u[1:] == (place, nb) and u[0].reaches(source)}
        for (by, wrote), operation in self.operations.items() if harmless != self.users else ():
            if not (writes or wrote) or by == known.first + thread or operation.event in told:
                continue
            if operation[1:4] in harmless:
                continue
            if operation.place + operation.nb <= place or place + nb <= operation.place:
                continue
            if at.newest(thread, by) < operation.tick:
                told.add(operation.event)
                yield operation
