"""Shared bandwidth: memory of a GPU, its link in each direction, its copy engines.

Note [Shares]: a transfer of `nbytes` that would take `length` seconds alone demands the rate nbytes / length. If the
total demand fits the capacity, each transfer gets its rate; otherwise all slow down by the factor capacity / demand. So
a tile with long matmuls demands little memory bandwidth, and a copy that demands a whole link shares it in proportion
to the demands. `progress` counts the seconds that a transfer would have run if it were alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol


class Events(Protocol):
    now: float

    def at(self, time: float, action: Callable[[], object]) -> None: ...


class Share:
    """A capacity in bytes per second. `moved` counts all bytes."""

    def __init__(self, events: Events, capacity: float) -> None:
        self._events, self.capacity = events, capacity
        self.moved = 0
        self._gone = 0.0
        self._progress, self._last, self._demand = 0.0, 0.0, 0.0
        self._active: list[tuple[float, int, float, Callable[[], None]]] = []
        self._number = self._version = 0

    def add(self, nbytes: int, length: float, done: Callable[[], None]) -> None:
        """Start a transfer of `length` seconds if alone, or longer if it alone exceeds the capacity."""
        self.moved += nbytes
        length = max(length, nbytes / self.capacity)
        if length <= 0:
            self._events.at(self._events.now, done)
            return
        self._advance()
        rate = nbytes / length
        self._demand += rate
        self._number += 1
        heapq.heappush(self._active, (self._progress + length, self._number, rate, done))
        self._expect()

    @property
    def _speed(self) -> float:
        return min(1.0, self.capacity / self._demand) if self._demand > 0 else 1.0

    def _advance(self) -> None:
        now = self._events.now
        passed = (now - self._last) * self._speed
        self._progress += passed
        self._gone += passed * self._demand
        self._last = now

    def gone(self) -> float:
        """Bytes transferred until now."""
        self._advance()
        return self._gone

    def _expect(self) -> None:
        """Schedule the end of the next transfer; invalidates the previous schedule."""
        if not self._active:
            self._demand = 0.0
            return
        self._version += 1
        version = self._version
        left = max(0.0, self._active[0][0] - self._progress)
        self._events.at(self._events.now + left / self._speed, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        self._progress = max(self._progress, self._active[0][0])
        ended = []
        while self._active and self._active[0][0] <= self._progress * (1 + 1e-12):
            _, _, rate, done = heapq.heappop(self._active)
            self._demand -= rate
            ended.append(done)
        self._expect()
        for done in ended:
            done()
