"""Explains why two accesses are not ordered: which part of a signal between their programs is missing.

A signal has four parts. A write releases the accesses of its thread, or of the whole program after a barrier. A read
sees that write and acquires. The two scopes include each other. A barrier passes the order on to the reader's other
threads. The report names the first missing part, with its line; without a direct signal, of one via a third program.
A fence leaves no event: that there was one shows in the clocks that later writes of its thread carry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from .clocks import GENERIC, Clock, Known, Source
from .shadow import Event, Operation, Word, program_name

NO_BARRIER = "no barrier separates these accesses by threads of one program"
NO_EVENT = "the accesses are in launches on different streams, and no fenced Signal and Await order them"


class Signal(NamedTuple):
    """A write of a word, and a read after it."""

    word: Word
    sent: Event
    wrote: Operation
    saw: Event
    read: Operation


Carrying = list[tuple[Source, Clock]]


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
        return _broken(words, events, known, first, by, tick, second) or f"{unread} after its {before.what}"
    signal = max(signals, key=lambda s: (known.made(s.read.source), _orders(s.saw, "acquire"), s.read.event))
    sent, saw, ever = signal.sent, signal.saw, _carried(signal.word)
    here = known.made(signal.read.source)
    got = known.got(signal.read.place) if here else ever
    if _covering(got, [by], tick):
        return _unacquired(known, signal, got, by, tick) if here else f"no read of this launch acquires {sent}"
    released = _orders(sent, "release") or _covering(ever, [by], tick)
    if here and released and not _later(signal, got, tick):
        return f"{saw} did not see what {sent} wrote"
    return _unreleased(signal, ever, by, tick)


def _unreleased(signal: Signal, carried: Carrying, by: int, tick: int) -> str:
    """Why a write does not release an access of its program."""
    sent = signal.sent
    if _orders(sent, "release"):
        return f"{sent} releases its own thread's accesses only: no barrier before it joins both threads"
    if _later(signal, carried, tick):
        alone = f"the fence before {sent} releases its own thread's accesses only"
        return f"{alone}: no barrier before that fence joins both threads"
    fenced = by not in _writers(signal) and _own(signal, carried)
    more = ": no fence lies between a barrier of both threads and it" if fenced else ""
    return f"{sent} does not release what came before it{more}"


def _unacquired(known: Known, signal: Signal, got: Carrying, by: int, tick: int) -> str:
    """Why a thread of the reading program does not know of an access that what it read carries."""
    saw, acquires = signal.saw, _orders(signal.saw, "acquire")
    if not any(source.reaches(signal.read.source) for source in _covering(got, [by], tick)):
        fence = "the fence before " if signal.wrote.source.reaches(signal.read.source) else ""
        return f"the scopes of {fence}{signal.sent} and {saw} do not reach each other"
    if (known.ticks(known.now(), np.arange(known.threads), np.full(known.threads, by), GENERIC) >= tick).any():
        if acquires:
            return f"{saw} acquires for its own thread only: no barrier after it joins the others"
        return f"the fence after {saw} acquires for its own thread only: no barrier after that fence joins the others"
    if acquires:
        return f"{saw} did not see what {signal.sent} wrote"
    return f"{saw} does not acquire what it saw, nor does a fence after it"


def _broken(
    words: Collection[Word], events: list[Event], known: Known, first: int, by: int, tick: int, second: Event
) -> str:
    """The first missing part of a chain of two signals via a third program; "" if there is no such chain, or if a fence
    of the third program leaves it open.

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
            if not _covering(_carried(one.word), [by], tick):
                if not _releases(one):
                    return f"{way} {one.sent} does not release what came before it"
            elif not _covering(_carried(two.word), [by], tick):
                if not _releases(two):
                    return f"{way} {two.sent} does not release what came before it"
                if _orders(two.sent, "release") and not _orders(one.saw, "acquire"):
                    return f"{way} {one.saw} does not acquire what it saw"
            elif known.made(two.read.source) and not _orders(two.saw, "acquire"):
                got = known.got(two.read.place)
                if _covering(got, [by], tick):
                    return f"{way} {_unacquired(known, two, got, by, tick)}"
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
                    yield Signal(word, events[write.event], write, saw, read)


def _carried(word: Word) -> Carrying:
    """The clocks that the values of a word carry."""
    return [pair for write in word.writes for pair in write.carried.items()]


def _covering(carried: Carrying, threads: list[int], tick: int) -> list[Source]:
    """The sources whose clocks cover the accesses of one of these threads up to a tick."""
    return [
        source
        for source, clock in carried
        if any(clock[GENERIC, thread] >= tick for thread in threads if thread < clock.shape[1])
    ]


def _own(signal: Signal, carried: Carrying) -> Carrying:
    """The clocks that releases of the writing program carry."""
    return [(source, clock) for source, clock in carried if source[:2] == signal.wrote.source[:2]]


def _releases(signal: Signal) -> bool:
    """Whether the write releases something, by its own order or by a fence."""
    return _orders(signal.sent, "release") or bool(_own(signal, _carried(signal.word)))


def _writers(signal: Signal) -> list[int]:
    """The threads of the writing program that wrote the word."""
    operations = signal.word.operations.items()
    return [by for (by, writes), each in operations if writes and each.source[:2] == signal.wrote.source[:2]]


def _later(signal: Signal, carried: Carrying, tick: int) -> bool:
    """Whether a release by such a thread came after this tick of the program."""
    return bool(_covering(_own(signal, carried), _writers(signal), tick))


def _orders(event: Event, order: str) -> bool:
    """Whether the event releases, or acquires."""
    return f"({order}" in event.what or "(acq_rel" in event.what
