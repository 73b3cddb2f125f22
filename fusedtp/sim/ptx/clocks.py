"""Happens-before between the machine's threads, by vector clocks: PTX ISA 8.8, section 8.9 ("base causality order").

A clock is an array [P, C] of int32 with one coordinate per thread and one per word that strong operations use:

    clock[0][thread]  everything that the thread did up to this tick of its program happened before
    clock[0][word]    the newest write to the word that happened before, or that was seen by a read that happened
                      before; nothing older may be read any more (8.9.5, causality order; 8.10.6, causality)
    clock[1]          the same, for what a proxy fence makes visible to asynchronous copies (8.9.5, proxy-preserved)
    clock[2]          the same, for what a fence makes visible through other addresses of the memory: multimem.py

Edges between threads carry clocks: release pattern to acquire pattern (8.8), barriers, mbarriers, fence.sc, and the end
of a stream's work to its next work. If one scope does not include the other thread, there is no edge (8.7).

Note [Threads share rows]. Each thread has its own clock: a warp does not order its lanes. But most threads of a program
have equal clocks, because they met at a barrier. So a program stores a few rows, and the index of a row for each
thread. A thread gets its own row when it alone acquires something, until the next barrier. A thread's own coordinate
is not in its row: it always sees its own accesses. All threads of a program share one tick counter. Every release
advances it, so a tick tells exactly which accesses of a thread precede a release. The result is as exact as one clock
per thread, and a barrier costs one maximum over a few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Clock = Array  # [P, C]
GENERIC, ASYNC, ALIAS, READONLY = 0, 1, 2, 3  # proxies, and ld.global.nc, which has no fence
WIDER = {"cta": 0, "gpu": 1, "sys": 2}


class Space:
    """Allocates the clock coordinates of a schedule's threads and words; holds the clocks published by fence.sc."""

    def __init__(self, proxies: int = 2) -> None:
        self.proxies = proxies
        self.count, self.capacity = 1, 256  # coordinate 0 is unused
        self.fences: dict[Source, Clock] = {}

    def take(self, count: int) -> int:
        first = self.count
        self.count += count
        if self.count > self.capacity:
            self.capacity = self.count + max(self.count // 4, 256)
        return first

    def fitted(self, clock: Array) -> Array:
        """The clock padded with zeros to the current capacity."""
        missing = self.capacity - clock.shape[-1]
        return np.concatenate([clock, np.zeros((*clock.shape[:-1], missing), np.int32)], axis=-1)


class Source(NamedTuple):
    """The program that released, and the scope."""

    rank: int
    program: int
    scope: str

    def reaches(self, other: Source) -> bool:
        """Whether each scope includes the other's threads (8.7). Every rank is a device."""
        if self.program == other.program and self.rank == other.rank:
            return True
        if "cta" in (self.scope, other.scope):
            return False
        return self.rank == other.rank or (self.scope == "sys" and other.scope == "sys")


def joined(a: Clock, b: Clock) -> Clock:
    """The maximum of two clocks."""
    small, large = sorted((a, b), key=lambda c: c.shape[1])
    large = large.copy()
    np.maximum(large[:, : small.shape[1]], small, out=large[:, : small.shape[1]])
    return large


Carried = dict[Source, Clock]


def carry(carried: Carried, more: Carried) -> None:
    """Add clocks to those that a value carries."""
    for source, clock in more.items():
        known = carried.get(source)
        carried[source] = clock if known is None or known is clock else joined(known, clock)


@dataclass
class Slot:
    """Coordinates of a program's threads, then that of its asynchronous copies. Successive programs share a slot."""

    first: int
    threads: int
    tick: int = 1


class Rows(NamedTuple):
    """The clocks of a program's threads at one moment."""

    rows: Array  # [R, P, C]
    which: Array  # [threads]
    used: int

    def newest(self, thread: int, coordinate: int) -> int:
        """A coordinate of a thread's clock: a thread's tick, or the number of a word's newest write; 0 if unknown."""
        row = self.rows[self.which[thread], GENERIC]
        return int(row[coordinate]) if coordinate < len(row) else 0


class Known:
    """The clocks of all threads of a program.

    engine    the coordinate of its asynchronous copies; began: what happened before its launch
    scoped    its Source for each scope
    pending   thread -> word -> clocks that its relaxed reads of the word carried: a fence may acquire them later
    fenced    thread -> scope -> its last releasing fence: the clocks of all threads at that time, and the tick
    """

    def __init__(self, space: Space, slot: Slot, source: Source, start: Clock | None = None) -> None:
        self.space, self.slot, self.first, self.threads = space, slot, slot.first, slot.threads
        self.engine = slot.first + slot.threads
        self.scoped = {scope: source._replace(scope=scope) for scope in WIDER}
        self.pending: dict[int, dict[int, Carried]] = {}
        self.fenced: dict[int, dict[str, tuple[Rows, int]]] = {}
        slot.tick += 1
        self.rows = np.zeros((2, space.proxies, space.capacity), np.int32)
        if start is not None:
            self.rows[0, :, : start.shape[1]] = start
        self.began = self.rows[0, GENERIC].copy()
        self.which, self.used = np.zeros(self.threads, np.intp), 1
        self._frozen: Rows | None = None

    # -- reading -----------------------------------------------------------------------------------------------------

    def now(self) -> Rows:
        return Rows(self.rows, self.which, self.used)

    def frozen(self) -> Rows:
        """A snapshot of the current clocks."""
        if self._frozen is None:
            self._frozen = Rows(self.rows[: self.used].copy(), self.which.copy(), self.used)
        return self._frozen

    def ticks(self, at: Rows, threads: Array, coordinates: Array, proxy: int) -> Array:
        """The given coordinates of each thread's clock. coordinates: [n] or [n, k] for n threads."""
        rows = at.rows if at.rows.shape[2] >= self.space.count else self.space.fitted(at.rows)
        if at.used == 1:
            return rows[0, proxy].take(coordinates)
        which = at.which[threads]
        return rows[which if coordinates.ndim == 1 else which[:, None], proxy, coordinates]

    def clock(self, thread: int) -> Clock:
        """A thread's clock with its own coordinate, for a release: its later accesses are not included."""
        clock: Clock = self.rows[self.which[thread]].copy()
        clock[GENERIC, self.first + thread] = self.over()
        return clock

    def together(self, threads: Array) -> Clock:
        """The joint clock of these threads, with their own coordinates."""
        held = list(set(self.which[threads].tolist())) if self.used > 1 else [0]
        clock: Clock = self.rows[held].max(0) if len(held) > 1 else self.rows[held[0]].copy()
        clock[GENERIC, self.first + threads] = self.over()
        return clock

    def made(self, source: Source) -> bool:
        """Whether a source is this program, in whichever scope."""
        return source[:2] == self.scoped["cta"][:2]

    def got(self, place: int) -> list[tuple[Source, Clock]]:
        """The clocks that the values carried which its threads read of a word."""
        return [pair for words in self.pending.values() for pair in words.get(place, {}).items()]

    def over(self) -> int:
        """End the current tick and return it; later accesses get a later tick."""
        self.slot.tick += 1
        return self.slot.tick - 1

    # -- edges -------------------------------------------------------------------------------------------------------

    def join(self, threads: Array, clock: Clock) -> None:
        """Join `clock` into the clocks of these threads."""
        width = clock.shape[1]

        def lacking() -> list[int]:
            return [at for at in set(self.which[threads].tolist()) if (clock > self.rows[at, :, :width]).any()]

        if width <= self.rows.shape[2] and not lacking():
            return  # nothing new, such as a poll that sees the same write again
        self._fit()
        for at in lacking():
            own = self._own(at, threads[self.which[threads] == at])
            row = self.rows[own, :, :width]
            np.maximum(row, clock, out=row)

    def meet(self, threads: Array, others: Sequence[Clock] = ()) -> None:
        """A barrier of these threads. others: clocks of threads that arrive without waiting."""
        self._fit()
        if self.used == 1 and not others and len(threads) == self.threads:
            self.rows[0, GENERIC, self.first : self.engine] = self.over()
            return
        clock = reduce(joined, others, self.together(threads))
        if len(threads) == self.threads:
            self.rows[0], self.which[:], self.used = clock, 0, 1
        else:
            self.which[threads] = at = self._free()
            self.rows[at] = clock

    def same(self, threads: Array) -> bool:
        """Whether these threads have equal clocks, apart from their own coordinates."""
        return self.used == 1 or bool((self.which[threads] == self.which[threads[0]]).all())

    def observe(self, threads: Array, word: int, number: int) -> None:
        """Record that these threads, which have equal clocks, read or made this write of a word."""
        if self.now().newest(int(threads[0]), word) < number:
            self._fit()
            own = self._own(int(self.which[threads[0]]), threads)
            self.rows[own, GENERIC, word] = number

    def acquire(self, threads: Sequence[int], carried: Carried, scope: str) -> None:
        """Join the clocks that a value carries, where the scopes include each other."""
        me = self.scoped[scope]
        for source, clock in carried.items():
            if source.reaches(me):
                self.join(np.array(threads), clock)

    def fence(self, threads: Array, order: str, scope: str) -> None:
        """order: "sc", "acq_rel", "acquire" or "release"."""
        if order != "release":
            for thread in threads.tolist():
                for carried in self.pending.get(thread, {}).values():
                    self.acquire([thread], carried, scope)
        if order == "sc":
            for thread in threads.tolist():
                self.acquire([thread], self.space.fences, scope)
                carry(self.space.fences, {self.scoped[scope]: self.clock(thread)})
        if order != "acquire":
            published = self.frozen(), self.over()
            for thread in threads.tolist():
                self.fenced.setdefault(thread, {})[scope] = published

    def fence_proxy(self, threads: Array, proxy: int) -> None:
        """Make visible to `proxy` what these threads know by generic accesses. No effect if nothing uses the proxy."""
        if proxy >= self.space.proxies:
            return
        self._fit()
        tick = self.over()
        for at in set(self.which[threads].tolist()):
            members = threads[self.which[threads] == at]
            own = self._own(at, members)
            row = self.rows[own]
            np.maximum(row[proxy], row[GENERIC], out=row[proxy])
            row[proxy, self.first + members] = tick

    def released(self, thread: int, order: str, scope: str) -> Carried:
        """The clocks that a strong write carries, by its own order and by earlier fences of its thread (8.8)."""
        carried: Carried = {}
        if order in ("release", "acq_rel"):
            carried[self.scoped[scope]] = self.clock(thread)
        for of, (at, tick) in self.fenced.get(thread, {}).items():
            if carried and WIDER[of] <= WIDER[scope]:
                continue  # the release carries more, at a scope at least as wide
            clock = at.rows[at.which[thread]].copy()
            clock[GENERIC, self.first + thread] = tick
            carry(carried, {self.scoped[of]: clock})
        return carried

    def copied(self) -> Clock:
        """The clock that the end of an asynchronous copy publishes: only the copy itself (8.9.1.1)."""
        clock = np.zeros((self.space.proxies, self.space.capacity), np.int32)
        clock[:, self.engine] = self.over()
        return clock

    def end(self) -> Clock:
        """The clock that the end of the program passes to the next work of its stream: everything, for every proxy."""
        clock = self.together(np.arange(self.threads))
        clock[GENERIC, self.engine] = self.over()
        clock[ASYNC:] = clock[GENERIC]
        return clock

    # -- rows --------------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        """Prepare the rows for a change: make room for all coordinates, and drop unused rows when they run out."""
        self._frozen = None
        if self.rows.shape[2] < self.space.count:
            self.rows = self.space.fitted(self.rows)
        if self.used > 8 and self.used == len(self.rows):
            held = np.unique(self.which)
            self.rows[: len(held)], self.which = self.rows[held], np.searchsorted(held, self.which)
            self.used = len(held)
            if 2 * self.used > len(self.rows):  # otherwise they would run out again soon
                self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])

    def _own(self, at: int, members: Array) -> int:
        """A row of these threads alone: their row `at` itself, or a copy if other threads share it."""
        if np.count_nonzero(self.which == at) == len(members):
            return at
        self.which[members] = new = self._free()
        self.rows[new] = self.rows[at]
        return new

    def _free(self) -> int:
        """The index of an unused row."""
        if self.used == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.used += 1
        return self.used - 1
