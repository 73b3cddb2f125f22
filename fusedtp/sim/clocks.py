"""Happens-before by vector clocks, and the shadow memory that finds races.

Programs are mapped to slots: program i of every launch of one stream takes the slot (rank, stream, i), since launch
order puts it after all programs of the launch before. clock[s][t] is how far slot s has seen slot t. A slot's own
entry grows with each of its releases, so that what it does afterwards is not covered by them.

Edges come from releases that an acquire reads from (through read-modify-writes in between, which carry on a release
sequence), and only where both scopes reach the other's device; from launch order on a stream; from waits of a host.
Relaxed atomics give none.

The shadow keeps for every byte the last write, and for every slot the last read, as numbers of events; plain accesses
and atomics apart. An access races with an earlier one that its slot has not seen, unless both are atomics that reach
one another. The first race of a schedule is found exactly (FastTrack, theorem 1); what follows it need not be.

Sources: Flanagan and Freund 2009, "FastTrack: Efficient and Precise Dynamic Race Detection"; PTX ISA, "Memory
Consistency Model", sections on release and acquire patterns and on morally strong operations.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

SYSTEM, DEVICE, BLOCK = "sys", "gpu", "cta"
PLAIN = 0
ATOMIC = {SYSTEM: 1, DEVICE: 2, BLOCK: 3}


class Order(NamedTuple):
    """What an atomic promises: sem is relaxed, acquire, release or acq_rel; scope sys, gpu or cta."""

    sem: str
    scope: str

    @property
    def acquires(self) -> bool:
        return self.sem in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        return self.sem in ("release", "acq_rel")


class Events:
    """All accesses of a schedule, by number; arrays that grow."""

    def __init__(self) -> None:
        self.slot = np.zeros(4096, np.int32)
        self.clock = np.zeros(4096, np.int32)
        self.atomic = np.zeros(4096, np.int8)
        self.rank = np.zeros(4096, np.int32)
        self.info: list[object] = [None]  # event 0

    def add(self, slot: int, clock: int, atomic: int, rank: int, info: object) -> int:
        n = len(self.info)
        if n == len(self.slot):
            for name in ("slot", "clock", "atomic", "rank"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros_like(getattr(self, name))]))
        self.slot[n], self.clock[n], self.atomic[n], self.rank[n] = slot, clock, atomic, rank
        self.info.append(info)
        return n


class Clocks:
    """Vector clocks of all slots, and what each atomic word carries."""

    def __init__(self, num_slots: int) -> None:
        self.seen = np.zeros((num_slots, num_slots), np.int32)
        np.fill_diagonal(self.seen, 1)
        # word -> {(rank, scope of the release): clock that it carries}
        self._words: dict[int, dict[tuple[int, str, int], np.ndarray]] = {}

    def now(self, slot: int) -> int:
        return int(self.seen[slot, slot])

    def join(self, slot: int, clock: np.ndarray) -> None:
        """The slot has seen all that `clock` has."""
        np.maximum(self.seen[slot], clock, out=self.seen[slot])

    def copy(self, slot: int) -> np.ndarray:
        """What the slot has seen, itself included; from here on it is a step further."""
        clock = self.seen[slot].copy()
        self.seen[slot, slot] += 1
        return clock

    def acquire(self, slot: int, rank: int, word: int, order: Order) -> None:
        """An atomic reads the word: see what its value carries. Before the access itself is checked for races."""
        carried = self._words.get(word)
        if carried and order.acquires:
            for (source, scope, by), clock in carried.items():
                if _reach(source, scope, rank, order.scope, by == slot):
                    self.join(slot, clock)

    def publish(self, slot: int, rank: int, word: int, order: Order, rmw: bool) -> None:
        """An atomic has written the word: let its new value carry what it releases, a read-modify-write the old too."""
        carried = dict(self._words.get(word, {})) if rmw else {}
        if order.releases:
            key = rank, order.scope, slot if order.scope == BLOCK else -1
            clock = self.copy(slot)
            carried[key] = np.maximum(carried[key], clock) if key in carried else clock
        if carried:
            self._words[word] = carried
        else:
            self._words.pop(word, None)

    def forget(self, first: int, last: int) -> None:
        """A plain store to bytes between these has replaced what words there carried."""
        for word in [w for w in self._words if first <= w < last]:
            del self._words[word]


def _reach(rank_a: int, scope_a: str, rank_b: int, scope_b: str, same_slot: bool) -> bool:
    """Whether each operation's scope includes the other's place. Every rank is a device."""
    if BLOCK in (scope_a, scope_b):
        return same_slot
    return rank_a == rank_b or (scope_a == SYSTEM and scope_b == SYSTEM)


class Shadow:
    """Who last wrote and read each byte.

    written, read   the last plain write of a byte, and the last plain read by each slot; event 0 is before the run
    unwritten       bytes that have not been written
    atomics         byte -> the last atomic read and write of each slot and scope: few bytes have any
    """

    def __init__(self, size: int, num_slots: int) -> None:
        self.written = np.zeros(size, np.int32)
        self.read = np.zeros((num_slots, size), np.int32)
        self.unwritten = np.zeros(size, bool)
        self._has_atomics = np.zeros(size, bool)
        self._atomics: dict[int, dict[tuple[int, bool, int], int]] = {}

    def conflict(
        self,
        clocks: Clocks,
        events: Events,
        slot: int,
        rank: int,
        atomic: int,
        places: np.ndarray,
        writes: bool,
    ) -> tuple[str, int, int] | None:
        """(rule, the earlier event, index in `places`) of a race of an access now with an earlier one, or None."""
        seen = clocks.seen[slot]
        last = self.written[places]
        found = _unseen(seen, events, last)
        if found is not None:
            return "write-write race" if writes else "read-write race", int(last[found]), found
        if writes:
            readers = self.read[:, places].ravel()
            found = _unseen(seen, events, readers)
            if found is not None:
                return "read-write race", int(readers[found]), found % len(places)
        if self._has_atomics[places].any():
            return self._conflict_with_atomics(seen, events, rank, atomic, places, writes)
        return None

    def _conflict_with_atomics(
        self, seen: np.ndarray, events: Events, rank: int, atomic: int, places: np.ndarray, writes: bool
    ) -> tuple[str, int, int] | None:
        for index in np.flatnonzero(self._has_atomics[places]).tolist():
            for (slot, wrote, _), event in self._atomics[int(places[index])].items():
                if not (writes or wrote) or events.clock[event] <= seen[slot]:
                    continue
                if not atomic:
                    return "write-write race" if writes and wrote else "read-write race", event, index
                if not _atomics_reach(atomic, rank, int(events.atomic[event]), int(events.rank[event])):
                    return "scope", event, index
        return None

    def note(self, slot: int, event: int, atomic: int, places: np.ndarray, writes: bool) -> None:
        """This access has happened."""
        if writes:
            self.unwritten[places] = False
        if atomic:
            self._has_atomics[places] = True
            for place in places.tolist():
                self._atomics.setdefault(place, {})[slot, writes, atomic] = event
        elif writes:
            self.written[places] = event
        else:
            self.read[slot, places] = event

    def last_write(self, place: int) -> int:
        """The event that last wrote this byte, 0 if none did."""
        atomics = [event for (_, wrote, _), event in self._atomics.get(place, {}).items() if wrote]
        return max(int(self.written[place]), *atomics, 0)


def _unseen(seen: np.ndarray, events: Events, last: np.ndarray) -> int | None:
    """The first of these events that the slot has not seen."""
    racing = events.clock[last] > seen[events.slot[last]]
    return int(np.argmax(racing)) if racing.any() else None


def _atomics_reach(a: int, rank_a: int, b: int, rank_b: int) -> bool:
    """Whether two atomics of different programs are atomic towards one another."""
    if ATOMIC[BLOCK] in (a, b):
        return False
    return rank_a == rank_b or (a == ATOMIC[SYSTEM] and b == ATOMIC[SYSTEM])
