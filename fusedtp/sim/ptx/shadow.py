"""Who wrote and who read each piece of memory last: where clocks do not order two accesses, they race.

PTX ISA 8.8, section 8.7.1: two accesses that overlap race if one of them writes, they are not ordered by causality and
not morally strong, that is both strong, each with a scope that reaches the other's thread, of the same bytes.

A tensor is divided into cells, of 16 bytes at first and as small as the smallest access to it later. Weak accesses
leave stamps (tick, thread) in cells: the last write, and for each slot of programs the last read. Strong ones are few;
their words keep them by thread. The first race of a schedule is found exactly, but for these:

    of a cell that several threads of one program read, the last reader alone is remembered
    Note [Loads in every thread]. A compiler loads a scalar in every thread and uses one thread's (`leave` in
    kernels/signals.py), so a thread may store to it before another warp has loaded. Within a program, a write after
    a read is not judged; nor, warp by warp, a read of the line that read the cell before the write. Where it matters,
    warps in random order show it in the numbers.

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
THREAD = (1 << 31) - 1  # of a stamp: tick << 32 | ALIASED | coordinate of the thread
ALIASED = 1 << 31  # the access was by a multicast address
MOST_WRITES = 16  # of a word, that are remembered


class Event(NamedTuple):
    """An access as reports name it. where: rank, launch, program."""

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
    """An earlier access that races with one now."""

    event: int
    cells: Array  # of the one now that overlap it
    by: int  # the earlier thread's coordinate
    tick: int  # when it was
    proxy: int = GENERIC  # ASYNC or ALIAS: only a fence of this proxy is missing. READONLY: it is too late


class Accessor(NamedTuple):
    """Who accesses now: threads of a program with what they know, by a proxy; and the stamp that they leave."""

    known: Known
    rows: Rows
    threads: Array
    proxy: int = GENERIC
    engine: bool = False  # its asynchronous copies do it, once they are complete

    def stamps(self, tick: int, cells: Array) -> Array:
        """For each of the cells, or for each row of them."""
        who = np.full(1, self.known.engine) if self.engine else self.known.first + self.threads
        stamps = who | (tick << 32) | ALIASED * (self.proxy == ALIAS)
        return stamps if cells.ndim == 1 else stamps[:, None]


class Shadow:
    """Cells of one tensor. first: its first byte on the line."""

    def __init__(self, first: int, nbytes: int, poisoned: bool) -> None:
        self.first, self.nbytes, self.shift = first, nbytes, 4
        self.begin, size = self._extent()
        self.writes, self.write_events = np.zeros(size, np.int64), np.zeros(size, np.int32)
        self.reads: dict[int, tuple[Array, Array]] = {}  # by the first coordinate of a slot: stamps, events
        self.unwritten = np.full(size, poisoned)
        self.strong = np.zeros(size, bool)  # cells that strong operations have used
        self.poisoned, self.written = poisoned, False
        self.log: list[tuple[Accessor, int, Array, int]] = []  # reads that have left no stamps yet
        self.logged = 0

    def _extent(self) -> tuple[int, int]:
        begin = self.first >> self.shift
        return begin, (self.first + max(self.nbytes, 1) - 1 >> self.shift) - begin + 1

    def cells(self, places: Array, width: int) -> Array:
        """Those that accesses of `width` bytes at these places touch: [n], or [n, k]."""
        if width < 1 << self.shift:
            self._refine(width.bit_length() - 1)
        cells = (places >> self.shift) - self.begin
        count = width >> self.shift
        return cells if count == 1 else cells[:, None] + np.arange(count)

    def places(self, cells: Array) -> Array:
        """The first byte of each."""
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
        """Weak accesses by others that this one races with, an event at a time.

        excused   of cells that a thread of the same program wrote last: where that is no race. Loads: Note [Loads in
                  every thread], None in lockstep. Stores: of what stands there, as threads may store copies of a value
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
        """This access has happened."""
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
        """Readers leave their stamps."""
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
    """A write to a word: its number among all strong ones, the value, and the clocks that it releases."""

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
    """Bytes that strong operations use: what they may still read, in coherence order, and who used them.

    coordinate   of clocks: the newest write that happened before
    operations   (coordinate of a thread, whether it wrote) -> its last
    users        all (source, place, nb) of operations
    released     coordinate of a thread -> what its last release here carries, also with its later writes (8.8)
    """

    __slots__ = ("coordinate", "nb", "operations", "place", "released", "users", "writes")

    def __init__(self, place: int, nb: int, coordinate: int, value: Any) -> None:
        self.place, self.nb, self.coordinate = place, nb, coordinate
        self.writes = deque([Write(0, value, {})], MOST_WRITES)
        self.operations: dict[tuple[int, bool], Operation] = {}
        self.users: set[tuple[Source, int, int]] = set()
        self.released: dict[int, Carried] = {}

    def at(self, number: int) -> Write:
        """The last write up to this number."""
        return next((w for w in reversed(self.writes) if w.number <= number), self.writes[0])

    def conflicts(
        self, known: Known, at: Rows, thread: int, source: Source | None, place: int, nb: int, writes: bool
    ) -> Iterator[Operation]:
        """Strong operations of other threads that an access now races with, an event at a time. source: None if weak"""
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
