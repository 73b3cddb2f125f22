"""Makes a loop that only moves data a single event: iterations that repeat the previous ones are skipped.

Note [Skipped iterations]: the first three iterations and the last one are executed. The others are assumed to cost the
same as the third if (1) the second and the third moved the same bytes between the same memories and did the same
matmuls, (2) neither synchronized with another program (no wait, no atomic, no integers in memory), and (3) all
loop-carried values changed by constant steps. The cost of the skipped iterations is added, and the loop-carried values
are extrapolated. This is exact for loops over addresses with a tail. It is not exact if the middle of a loop differs
from its begin, such as with a mask that closes half way; `exact=True` executes every iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .account import Account
from .masks import Mask
from .values import Tile

ENOUGH = 6


class Loop:
    """Replaces range(...) in a rewritten kernel; the kernel calls `turn` at the end of every iteration."""

    def __init__(self, account: Account, *bounds: int) -> None:
        self.range, self.account = range(*bounds), account
        self.active = len(self.range) >= ENOUGH and not account.exact
        self._state: dict[str, Any] = {}
        self._before: list[tuple[dict[str, Any], Any]] = []

    def __iter__(self) -> Iterator[int]:
        return self._sparse() if self.active else iter(self.range)

    def __getitem__(self, name: str) -> Any:
        return self._state[name]

    def _sparse(self) -> Iterator[int]:
        i = 0
        while i < len(self.range):
            self._turned, self._jump = False, False
            self._mark = self.account.mark()
            yield self.range[i]
            if not self._turned:  # the body ended with `continue`
                self.active = False
            i = len(self.range) - 1 if self._jump else i + 1

    def turn(self, names: dict[str, Any], carried: tuple[str, ...]) -> bool:
        """Whether the loop jumps to its last iteration; the kernel then takes the loop-carried values from here."""
        self._turned = True
        state = {name: names[name] for name in carried if name in names}
        self._before.append((state, self.account.since(self._mark)))
        if len(self._before) < 3:
            return False
        self.active = False
        (first, _), (second, cost), (third, same) = self._before
        if cost is None or not cost or cost != same or set(state) != set(carried):
            return False
        times = len(self.range) - 4
        for name in carried:
            ahead = _ahead(first.get(name), second.get(name), third[name], times)
            if ahead is _UNEVEN:
                return False
            self._state[name] = ahead
        self.account.repeat(self._mark, times)
        self._jump = True
        return True


_UNEVEN = object()


def _ahead(a: Any, b: Any, c: Any, times: int) -> Any:
    """The value `times` steps after a, b, c if they grow by constant steps; else _UNEVEN."""
    if a is b is c:
        return c
    if type(a) is int and type(b) is int and type(c) is int:
        return c + (c - b) * times if c - b == b - a else _UNEVEN
    if isinstance(c, Tile) and isinstance(b, Tile) and isinstance(a, Tile):
        if a.shape != c.shape or b.shape != c.shape or a.dtype != c.dtype:
            return _UNEVEN
        if not (a.known or b.known or c.known):
            return c
        if a.affine and b.affine and c.affine and a.steps == b.steps == c.steps:
            if c.base - b.base == b.base - a.base:
                return Tile(c.shape, c.dtype, c.base + (c.base - b.base) * times, c.steps)
        elif a.known and b.known and c.known:
            x, y, z = a.dense(), b.dense(), c.dense()
            if np.array_equal(z - y, y - x):
                return Tile(c.shape, c.dtype, data=z + (z - y) * times)
        return _UNEVEN
    if isinstance(c, Mask) and isinstance(b, Mask) and isinstance(a, Mask):
        return c if c.bounds is not None and a.bounds == b.bounds == c.bounds else _UNEVEN
    if isinstance(c, (bool, str, tuple, type(None))) and a == b == c:
        return c
    return _UNEVEN
