"""Races, reads of unwritten memory, accesses out of bounds: each access is judged as it happens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .clocks import PLAIN, Clocks, Events, Shadow
from .faults import Access, Fault, SimulationFault, Site
from .memory import Map
from .streams import Actor, Turn


class Info(NamedTuple):
    """What a report needs of an event."""

    actor: Actor
    what: str
    site: Site
    step: int
    wrote: bool


class Detector:
    """Clocks and shadow of one schedule. With `races` False only bounds are checked."""

    def __init__(self, memory: Map, num_slots: int, turn: Turn, races: bool) -> None:
        self.clocks = Clocks(num_slots)
        self._memory, self._turn, self._races = memory, turn, races
        self._events, self._shadow = Events(), Shadow(memory.size, num_slots)
        for a in memory.allocations:
            if a.poisoned:
                self._shadow.unwritten[a.place : a.place + a.nbytes] = True

    def access(
        self, what: str, places: np.ndarray, itemsize: int, site: Site, *, writes: bool, atomic: int = PLAIN
    ) -> None:
        """Check an access of the running program against all earlier ones, and note it. Raises SimulationFault."""
        if not self._races:
            return
        me = self._turn.me
        covered = (places[:, None] + np.arange(itemsize)).ravel() if itemsize > 1 else places
        info = Info(me, what, site, self._turn.step, writes)
        found = self._shadow.conflict(self.clocks, self._events, me.slot, me.rank, atomic, covered, writes)
        if found is not None:
            raise SimulationFault(self._race(*found, info, covered))
        if not writes:
            fresh = self._shadow.unwritten[covered]
            if fresh.any():
                read = self._described(info, covered[np.flatnonzero(fresh)])
                raise SimulationFault(
                    Fault("never written", f"nobody has written what {read.what} reads", (read,))
                )
        event = self._events.add(me.slot, self.clocks.now(me.slot), atomic, me.rank, info)
        self._shadow.note(me.slot, event, atomic, covered, writes)

    def out_of_bounds(self, what: str, address: int, site: Site) -> SimulationFault:
        """The running program's access to an address that is in no allocation."""
        me = self._turn.me
        at = (address,)
        access = Access(me.rank, me.name, me.program, site, what, "memory", at, at, self._turn.step)
        return SimulationFault(Fault("out of bounds", self._memory.nearest(address), (access,)))

    def last_writer(self, place: int) -> Actor | None:
        """Who last wrote this byte."""
        info = self._events.info[self._shadow.last_write(place)]
        return info.actor if isinstance(info, Info) else None

    def _race(self, rule: str, event: int, index: int, now: Info, covered: np.ndarray) -> Fault:
        """Of `now`, at covered[index] at least, with an earlier event."""
        before = self._events.info[event]
        assert isinstance(before, Info)  # what was there before the run races with nothing
        last = self._shadow.written if before.wrote else self._shadow.read[before.actor.slot]
        same = covered[last[covered] == event]
        same = same if len(same) else covered[index : index + 1]  # an atomic
        a, b = self._described(before, same, with_value=False), self._described(now, same)
        message = f"rank {a.rank}'s {a.what} and rank {b.rank}'s {b.what} of {a.tensor} are not ordered"
        return Fault(rule, message, (a, b))

    def _described(self, info: Info, places: np.ndarray, with_value: bool = True) -> Access:
        span, actor = self._memory.span(places), info.actor
        value = self._memory.value(int(places.min())) if with_value else ""
        return Access(
            actor.rank, actor.name, actor.program, info.site, info.what, span.tensor, span.first, span.last, info.step,
            value,
        )  # fmt: skip
