"""Explains why two accesses are not ordered: which part of a signal between their programs is missing.

A signal has four parts. A write releases the accesses of its thread, or of the whole program after a barrier. A read
sees that write and acquires. The two scopes include each other. A barrier passes the order on to the reader's other
threads. The report names the first missing part, with its line; without a direct signal, of one via a third program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from .clocks import GENERIC, Known, Source
from .shadow import Event, Operation, Word, program_name

NO_BARRIER = "no barrier separates these accesses by threads of one program"
NO_EVENT = "the accesses are in launches on different streams, and no fenced Signal and Await order them"


class Signal(NamedTuple):
    """A write of a word, and a read after it."""

    word: Word
    sent: Event
    saw: Event
    read: Operation


def cause(
    words: Collection[Word], events: list[Event], known: Known, first: int, by: int, tick: int, second: Event
) -> str:
    """The cause in words.

    first, by, tick   event of the earlier access, its thread's coordinate, and its tick
    known             the clocks of the program of the current access
    """
    before = events[first]
    if before.where == second.where:
        return NO_BARRIER if known.first <= by <= known.engine else NO_EVENT
    signals = [s for s in _signals(words, events, before.where, first) if s.saw.where == second.where]
    if not signals:
        unread = f"{program_name(second.where)}, has read no word that {program_name(before.where)}, wrote"
        return _broken(words, events, first, by, tick, second) or f"{unread} after its {before.what}"
    word, sent, saw, read = max(signals, key=lambda s: (_orders(s.saw, "acquire"), s.read.event))
    carrying = _carrying(word, by, tick)
    if not carrying:
        if _orders(sent, "release"):
            return f"{sent} releases its own thread's accesses only: no barrier before it joins both threads"
        return f"{sent} does not release what came before it"
    if not any(source.reaches(read.source) for source in carrying):
        return f"the scopes of {sent} and {saw} do not reach each other"
    if (known.ticks(known.now(), np.arange(known.threads), np.full(known.threads, by), GENERIC) >= tick).any():
        return f"{saw} acquires for its own thread only: no barrier after it joins the others"
    if not _orders(saw, "acquire"):
        return f"{saw} does not acquire what it saw"
    return f"{saw} did not see what {sent} wrote"


def _broken(words: Collection[Word], events: list[Event], first: int, by: int, tick: int, second: Event) -> str:
    """The first missing part of a chain of two signals via a third program; "" if there is no such chain.

    The third program must wait by loads: an atomic that draws a number from a shared counter does not count as a wait.
    """
    before = events[first]
    for one in _signals(words, events, before.where, first):
        if one.saw.where in (before.where, second.where) or one.saw.what.startswith("atomic"):
            continue
        way = f"a signal goes through {program_name(one.saw.where)}, but"
        for two in _signals(words, events, one.saw.where, one.read.event):
            if two.saw.where != second.where:
                continue
            for word, sent, saw, _ in (one, two):
                if not _carrying(word, by, tick):
                    if not _orders(sent, "release"):
                        return f"{way} {sent} does not release what came before it"
                    break
                if not _orders(saw, "acquire"):
                    return f"{way} {saw} does not acquire what it saw"
    return ""


def _signals(words: Collection[Word], events: list[Event], where: tuple[int, str, int], after: int) -> Iterator[Signal]:
    """Signals by words that a program wrote after an event and any program read later. Atomics both write and read."""
    for word in words:
        for (_, writes), write in word.operations.items():
            if not writes or write.event <= after or events[write.event].where != where:
                continue
            for (_, wrote), read in word.operations.items():
                saw = events[read.event]
                if read.event > write.event and (not wrote or saw.what.startswith("atomic")):
                    yield Signal(word, events[write.event], saw, read)


def _carrying(word: Word, by: int, tick: int) -> list[Source]:
    """The sources whose releases with a value of the word cover a thread's accesses up to a tick."""
    carried = [pair for write in word.writes for pair in write.carried.items()]
    return [source for source, clock in carried if by < clock.shape[1] and clock[GENERIC, by] >= tick]


def _orders(event: Event, order: str) -> bool:
    """Whether the event releases, or acquires."""
    return f"({order}" in event.what or "(acq_rel" in event.what
