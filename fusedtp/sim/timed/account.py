"""What a program has done since it last met anybody: bytes by memory, products, and loads that it had to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

LOAD, STORE, DOT, STALL = "load", "store", "dot", "stall"
SUM, SPREAD = "sum", "spread"  # by a switch
PREFETCH = "prefetch"


class Entry(NamedTuple):
    """what   LOAD or STORE of `amount` bytes in the memory of rank `where`; SUM of as many over all ranks' memories, or
    SPREAD of them to all; PREFETCH of as many of the own memory; DOT of `amount` operations in dtype `where`; STALL,
    `amount` loads that nothing hid
    key    first address and extent of a load, by which the cache knows it again"""

    what: str
    where: int | str
    amount: int
    key: tuple[int, int] | None = None


class Account:
    """Entries of one program, in order. `met` grows whenever it meets others: a loop across that is no one event."""

    def __init__(self, exact: bool = False, flush: Callable[[], None] | None = None) -> None:
        """`flush` is called between products and a store of their result: there one segment ends."""
        self.exact, self._flush = exact, flush
        self.entries: list[Entry] = []
        self.met = 0
        self._products = False  # since the last store
        self._waiting = False  # for loads whose values are not used yet
        self._pipelined = False

    def load(self, rank: int, nbytes: int, key: tuple[int, int]) -> None:
        if nbytes:
            self.entries.append(Entry(LOAD, rank, nbytes, key))
            self._waiting = True

    def prefetch(self, nbytes: int) -> None:
        """Into the cache, which nothing waits for."""
        self.entries.append(Entry(PREFETCH, "", nbytes))

    def sum(self, nbytes: int) -> None:
        """A load by a multicast address."""
        if nbytes:
            self.entries.append(Entry(SUM, "", nbytes))
            self._waiting = True

    def store(self, rank: int | None, nbytes: int) -> None:
        """In the memory of a rank; None: by a multicast address, in all."""
        if self._products and self._flush is not None:
            self._flush()
        self._stall()
        self._pipelined = False
        if nbytes:
            self.entries.append(Entry(SPREAD, "", nbytes) if rank is None else Entry(STORE, rank, nbytes))

    def dot(self, dtype: str, flops: int) -> None:
        """The compiler's pipeline hides the loads of a loop of products, all but the first."""
        if not self._pipelined:
            self._stall()
        self._waiting, self._pipelined, self._products = False, True, True
        self.entries.append(Entry(DOT, dtype, flops))

    def _stall(self) -> None:
        if self._waiting:
            self.entries.append(Entry(STALL, "", 1))
        self._waiting = False

    def take(self) -> list[Entry]:
        """All entries since the last time."""
        self._stall()
        taken, self.entries = self.entries, []
        self.met += 1
        self._products = self._pipelined = False
        return taken

    # -- for loops -------------------------------------------------------------------------------------------------

    def mark(self) -> tuple[int, int]:
        return self.met, len(self.entries)

    def since(self, mark: tuple[int, int]) -> list[tuple[str, int | str, int]] | None:
        """What was done since; None if others were met."""
        met, begin = mark
        return None if met != self.met else [entry[:3] for entry in self.entries[begin:]]

    def repeat(self, mark: tuple[int, int], times: int) -> None:
        """Everything since the mark, this many times more."""
        begin = mark[1]
        self.entries[begin:] = [e._replace(amount=e.amount * (1 + times)) for e in self.entries[begin:]]
