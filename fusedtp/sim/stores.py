"""Stores on their way: in weak-memory mode a store is visible to its own program at once, to others late.

A program's plain stores wait here and land one by one, in any order, until a release of the program makes all that
came before it land first. So a missing or too weak release shows as a wrong value too, not only as a race.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Pending(NamedTuple):
    first: int  # places in the shadow
    last: int
    rank: int  # that owns the memory
    land: Callable[[], object]


class Stores:
    """Pending stores by slot."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pending: dict[int, list[Pending]] = {}

    def add(
        self, slot: int, places: np.ndarray, itemsize: int, rank: int, land: Callable[[], object]
    ) -> None:
        """A store of `slot`; earlier ones of its own to the same place land first."""
        self.own(slot, places, itemsize)
        first, last = int(places.min()), int(places.max()) + itemsize
        self._pending.setdefault(slot, []).append(Pending(first, last, rank, land))

    def own(self, slot: int, places: np.ndarray, itemsize: int) -> None:
        """The slot itself reads or writes there: its stores to these elements land."""
        mine = self._pending.get(slot)
        if not mine:
            return
        first, last = int(places.min()), int(places.max()) + itemsize
        hit = [p for p in mine if p.first < last and first < p.last]
        for pending in hit:
            pending.land()
            mine.remove(pending)

    def release(self, slot: int, rank: int | None = None) -> None:
        """All of the slot's stores land (those to memory of `rank`, where given), in any order."""
        mine = self._pending.get(slot, [])
        due = [p for p in mine if rank is None or p.rank == rank]
        self._rng.shuffle(due)
        for pending in due:
            pending.land()
            mine.remove(pending)

    def drift(self) -> None:
        """At a switch: now and then one store lands."""
        waiting = [mine for mine in self._pending.values() if mine]
        if waiting and self._rng.random() < 0.25:
            mine = self._rng.choice(waiting)
            mine.pop(self._rng.randrange(len(mine))).land()

    def release_all(self) -> None:
        for slot in list(self._pending):
            self.release(slot)
