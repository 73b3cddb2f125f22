"""Happens-before between the machine's threads, by vector clocks: PTX ISA 8.8, section 8.9 ("base causality order").

A clock is an array [P, C] of int32 with one coordinate a thread and one a word that strong operations use:

    clock[0][thread]  what the thread did up to this tick of its program happened before
    clock[0][word]    the newest write to the word that happened before, or that a read saw which happened before;
                      nothing older may be read any more (8.9.5, causality order; 8.10.6, causality)
    clock[1]          the same, of what a proxy fence lets asynchronous copies see (8.9.5, proxy-preserved)
    clock[2]          of what one lets other addresses of the same memory see, where there are any: multimem.py

Edges between threads carry clocks: release patterns to acquire patterns (8.8), barriers, mbarriers, fence.sc,
the end of work to the next on its stream. Where scopes do not reach both ways, there is no edge (8.7).

Note [Threads share rows]. Clocks are of single threads: lanes of a warp are not ordered by the warp. Most threads of a
program know the same, since they met at a barrier, so a program keeps a few rows and which of them each thread has; a
thread gets a row of its own when it alone acquires something, until the next barrier. A thread's own coordinate is
not in its row: it has always seen itself. One tick counts for all threads of a program; it goes on with each release,
so a tick says exactly which accesses of a thread came before a release. So nothing is lost against a clock a thread,
and a barrier costs one maximum over a few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Clock = Array  # [P, C]
GENERIC, ASYNC, ALIAS, READONLY = 0, 1, 2, 3  # proxies, and ld.global.nc, for which there is no fence
WIDER = {"cta": 0, "gpu": 1, "sys": 2}


class Space:
    """Coordinates of all threads and words of a schedule, and what fences of sequential consistency have published."""

    def __init__(self, proxies: int = 2) -> None:
        self.proxies = proxies
        self.count, self.capacity = 1, 256  # coordinate 0 is no one's
        self.fences: dict[Source, Clock] = {}

    def take(self, count: int) -> int:
        first = self.count
        self.count += count
        if self.count > self.capacity:
            self.capacity = self.count + max(self.count // 4, 256)
        return first

    def fitted(self, clock: Array) -> Array:
        """With as many coordinates as there are now, which is more than it has."""
        missing = self.capacity - clock.shape[-1]
        return np.concatenate([clock, np.zeros((*clock.shape[:-1], missing), np.int32)], axis=-1)


class Source(NamedTuple):
    """Who released, at which scope."""

    rank: int
    program: int
    scope: str

    def reaches(self, other: Source) -> bool:
        """Whether each scope includes the other's threads: 8.7. Every rank is a device."""
        if self.program == other.program and self.rank == other.rank:
            return True
        if "cta" in (self.scope, other.scope):
            return False
        return self.rank == other.rank or (self.scope == "sys" and other.scope == "sys")


def joined(a: Clock, b: Clock) -> Clock:
    """All that either clock knows."""
    small, large = sorted((a, b), key=lambda c: c.shape[1])
    large = large.copy()
    np.maximum(large[:, : small.shape[1]], small, out=large[:, : small.shape[1]])
    return large


Carried = dict[Source, Clock]


def carry(carried: Carried, more: Carried) -> None:
    """Let a value carry more clocks."""
    for source, clock in more.items():
        known = carried.get(source)
        carried[source] = clock if known is None or known is clock else joined(known, clock)


@dataclass
class Slot:
    """Coordinates of a program's threads, and of its asynchronous copies after them. Programs in a row share them."""

    first: int
    threads: int
    tick: int = 1


class Rows(NamedTuple):
    """Clocks of a program's threads at a moment."""

    rows: Array  # [R, P, C]
    which: Array  # [threads]
    used: int

    def newest(self, thread: int, coordinate: int) -> int:
        """How far a thread knows another one or a word: the tick, or the number of the newest write; else 0."""
        row = self.rows[self.which[thread], GENERIC]
        return int(row[coordinate]) if coordinate < len(row) else 0


class Known:
    """What each thread of a program knows.

    engine    the coordinate of its asynchronous copies; began: what happened before its launch
    scoped    who its threads are to others, by scope
    pending   thread -> word -> what its relaxed reads of the word carried: a fence may acquire it later
    fenced    thread -> scope -> its last fence that releases: what all threads knew, and the tick
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
        """As it is now, also later."""
        if self._frozen is None:
            self._frozen = Rows(self.rows[: self.used].copy(), self.which.copy(), self.used)
        return self._frozen

    def ticks(self, at: Rows, threads: Array, coordinates: Array, proxy: int) -> Array:
        """How far each thread knows a coordinate. coordinates [n] or [n, k] of n threads."""
        rows = at.rows if at.rows.shape[2] >= self.space.count else self.space.fitted(at.rows)
        if at.used == 1:
            return rows[0, proxy].take(coordinates)
        which = at.which[threads]
        return rows[which if coordinates.ndim == 1 else which[:, None], proxy, coordinates]

    def clock(self, thread: int) -> Clock:
        """All that a thread knows, itself included; what it does from here on is not in it."""
        clock: Clock = self.rows[self.which[thread]].copy()
        clock[GENERIC, self.first + thread] = self.over()
        return clock

    def together(self, threads: Array) -> Clock:
        """All that these threads know, themselves included."""
        held = list(set(self.which[threads].tolist())) if self.used > 1 else [0]
        clock: Clock = self.rows[held].max(0) if len(held) > 1 else self.rows[held[0]].copy()
        clock[GENERIC, self.first + threads] = self.over()
        return clock

    def over(self) -> int:
        """The tick that ends now: what threads do from here on has a later one."""
        self.slot.tick += 1
        return self.slot.tick - 1

    # -- edges -------------------------------------------------------------------------------------------------------

    def join(self, threads: Array, clock: Clock) -> None:
        """These threads know what `clock` does."""
        width = clock.shape[1]

        def lacking() -> list[int]:
            return [at for at in set(self.which[threads].tolist()) if (clock > self.rows[at, :, :width]).any()]

        if width <= self.rows.shape[2] and not lacking():
            return  # as in a poll that sees what the last one saw
        self._fit()
        for at in lacking():
            own = self._own(at, threads[self.which[threads] == at])
            row = self.rows[own, :, :width]
            np.maximum(row, clock, out=row)

    def meet(self, threads: Array, others: Sequence[Clock] = ()) -> None:
        """A barrier of these threads. others: of threads that have only arrived."""
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
        """Whether these threads know the same, but for themselves."""
        return self.used == 1 or bool((self.which[threads] == self.which[threads[0]]).all())

    def observe(self, threads: Array, word: int, number: int) -> None:
        """Threads that know the same have read or written this write of a word."""
        if self.now().newest(int(threads[0]), word) < number:
            self._fit()
            own = self._own(int(self.which[threads[0]]), threads)
            self.rows[own, GENERIC, word] = number

    def acquire(self, threads: Sequence[int], carried: Carried, scope: str) -> None:
        """What a value carries, as far as scopes reach."""
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
        """What these threads know by ordinary accesses, another proxy may see, if something uses that one."""
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
        """What a strong write of a thread carries by its own order and by the fences before it: 8.8."""
        carried: Carried = {}
        if order in ("release", "acq_rel"):
            carried[self.scoped[scope]] = self.clock(thread)
        for of, (at, tick) in self.fenced.get(thread, {}).items():
            if carried and WIDER[of] <= WIDER[scope]:
                continue  # the release carries more, and as far
            clock = at.rows[at.which[thread]].copy()
            clock[GENERIC, self.first + thread] = tick
            carry(carried, {self.scoped[of]: clock})
        return carried

    def copied(self) -> Clock:
        """What the end of an asynchronous copy publishes: that alone, 8.9.1.1."""
        clock = np.zeros((self.space.proxies, self.space.capacity), np.int32)
        clock[:, self.engine] = self.over()
        return clock

    def end(self) -> Clock:
        """What the end of the program publishes to what its stream does next: all, for every proxy."""
        clock = self.together(np.arange(self.threads))
        clock[GENERIC, self.engine] = self.over()
        clock[ASYNC:] = clock[GENERIC]
        return clock

    # -- rows --------------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        """Before a change: room for all coordinates, and no row that no thread has."""
        self._frozen = None
        if self.rows.shape[2] < self.space.count:
            self.rows = self.space.fitted(self.rows)
        if self.used > 8 and self.used == len(self.rows):
            held = np.unique(self.which)
            self.rows[: len(held)], self.which = self.rows[held], np.searchsorted(held, self.which)
            self.used = len(held)
            if 2 * self.used > len(self.rows):  # else the next ones come here again soon
                self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])

    def _own(self, at: int, members: Array) -> int:
        """A row that these threads, which have row `at`, have alone: the same, or a copy where others have it too."""
        if np.count_nonzero(self.which == at) == len(members):
            return at
        self.which[members] = new = self._free()
        self.rows[new] = self.rows[at]
        return new

    def _free(self) -> int:
        """A row that no thread has."""
        if self.used == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.used += 1
        return self.used - 1
