"""The work of a program since it last synchronized: bytes by memory, matmuls, and loads that it had to wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

LOAD, STORE, DOT, STALL = "load", "store", "dot", "stall"
SUM, SPREAD = "sum", "spread"  # done by a switch
PREFETCH = "prefetch"


class Entry(NamedTuple):
    """what   LOAD, STORE: `amount` bytes in the memory of rank `where`; SUM, SPREAD: `amount` bytes summed over, or
    written to, the memories of all ranks; PREFETCH: `amount` bytes of local memory; DOT: `amount` operations in dtype
    `where`; STALL: `amount` loads whose latency is not hidden
    key    (first address, last address) of a load, by which the cache recognizes it"""

    what: str
    where: int | str
    amount: int
    key: tuple[int, int] | None = None


class Account:
    """Entries of one program, in order. `met` grows at each synchronization: no loop across it is a single event."""

    def __init__(self, exact: bool = False, flush: Callable[[], None] | None = None) -> None:
        """`flush` is called between matmuls and a store of their result: a segment ends there."""
        self.exact, self._flush = exact, flush
        self.entries: list[Entry] = []
        self.met = 0
        self._products = False  # matmuls since the last store
        self._waiting = False  # there are loads whose values are not used yet
        self._pipelined = False

    def load(self, rank: int, nbytes: int, key: tuple[int, int]) -> None:
        if nbytes:
            self.entries.append(Entry(LOAD, rank, nbytes, key))
            self._waiting = True

    def prefetch(self, nbytes: int) -> None:
        """A prefetch into the cache; nothing waits for it."""
        self.entries.append(Entry(PREFETCH, "", nbytes))

    def sum(self, nbytes: int) -> None:
        """A load from a multicast address."""
        if nbytes:
            self.entries.append(Entry(SUM, "", nbytes))
            self._waiting = True

    def store(self, rank: int | None, nbytes: int) -> None:
        """A store to the memory of a rank; None: to a multicast address, so to all ranks."""
        if self._products and self._flush is not None:
            self._flush()
        self._stall()
        self._pipelined = False
        if nbytes:
            self.entries.append(Entry(SPREAD, "", nbytes) if rank is None else Entry(STORE, rank, nbytes))

    def dot(self, dtype: str, flops: int) -> None:
        """A matmul. In a loop of matmuls, the compiler's pipelining hides all loads but the first."""
        if not self._pipelined:
            self._stall()
        self._waiting, self._pipelined, self._products = False, True, True
        self.entries.append(Entry(DOT, dtype, flops))

    def _stall(self) -> None:
        if self._waiting:
            self.entries.append(Entry(STALL, "", 1))
        self._waiting = False

    def take(self) -> list[Entry]:
        """All entries since the last call."""
        self._stall()
        taken, self.entries = self.entries, []
        self.met += 1
        self._products = self._pipelined = False
        return taken

    # -- for loops -------------------------------------------------------------------------------------------------

    def mark(self) -> tuple[int, int]:
        return self.met, len(self.entries)

    def since(self, mark: tuple[int, int]) -> list[tuple[str, int | str, int]] | None:
        """The entries since the mark; None if the program synchronized since then."""
        met, begin = mark
        return None if met != self.met else [entry[:3] for entry in self.entries[begin:]]

    def repeat(self, mark: tuple[int, int], times: int) -> None:
        """Repeat everything since the mark this many more times."""
        begin = mark[1]
        self.entries[begin:] = [e._replace(amount=e.amount * (1 + times)) for e in self.entries[begin:]]
