"""Why two accesses are not ordered: which part of a signal from the first's program to the second's is missing.

A signal has four parts. A write releases what its thread did, after a barrier what all threads of the program did. A
read sees that write and acquires. The scopes of both reach each other. A barrier lets the reader's other threads know.
The first part that is missing is named, with its line; where no signal goes straight, of one by way of a third program.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .clocks import GENERIC, Known
from .shadow import Event, Operation, Word

Events = list[Event | None]


def cause(words: list[Word], events: Events, known: Known, first: int, by: int, tick: int, second: Event) -> str:
    """In words.

    first, by, tick   event of the earlier access, its thread's coordinate, and the tick at which it happened
    known             what the program knows that accesses now
    """
    before = events[first]
    assert before is not None
    signals = [
        (write, read, word)
        for word in words
        for write in _of(word, events, before.where, True, first)
        for read in _of(word, events, second.where, False, write.event)
    ]
    if not signals:
        broken = _broken(words, events, first, by, tick, second)
        return broken or f"{_who(second)} has read no word that {_who(before)} wrote after its {before.what}"
    write, read, word = max(signals, key=lambda signal: (_acquires(events[signal[1].event]), signal[1].event))
    wrote, saw = events[write.event], events[read.event]
    assert wrote is not None and saw is not None
    carried = [pair for each in word.writes for pair in each.carried.items()]
    carrying = [source for source, clock in carried if by < clock.shape[1] and clock[GENERIC, by] >= tick]
    if not carrying:
        if _releases(wrote):
            alone = "releases what its own thread did, and no barrier came before it that both threads reached"
            return f"the {wrote.what} at {wrote.site} {alone}"
        return f"the {wrote.what} at {wrote.site} does not release what came before it"
    if not any(source.reaches(read.source) for source in carrying):
        ends = f"the {wrote.what} at {wrote.site} and the {saw.what} at {saw.site}"
        return f"the scopes of {ends} do not reach each other"
    if (known.ticks(known.now(), np.arange(known.threads), np.full(known.threads, by), GENERIC) >= tick).any():
        return f"the {saw.what} at {saw.site} acquires it for its own thread, and no barrier lets the others know"
    if not _acquires(saw):
        return f"the {saw.what} at {saw.site} does not acquire what it saw"
    return f"the {saw.what} at {saw.site} did not see what the {wrote.what} at {wrote.site} wrote"


def _broken(words: list[Word], events: Events, first: int, by: int, tick: int, second: Event) -> str:
    """The first part that is missing of a chain of two signals, by way of a third program; "" where there is none.

    The third waits by loads: an atomic that takes a number of a common counter is not taken for a wait.
    """
    before = events[first]
    assert before is not None
    for word, sent, saw, at in _signals(words, events, before.where, first):
        if saw.where in (before.where, second.where) or saw.what.startswith("atomic"):
            continue
        for last, passed, seen, _ in _signals(words, events, saw.where, at):
            if seen.where != second.where:
                continue
            way = f"a signal goes by way of {_who(saw)} but"
            if not _carries(word, by, tick):
                if not _releases(sent):
                    return f"{way} the {sent.what} at {sent.site} does not release what came before it"
            elif not _acquires(saw):
                return f"{way} the {saw.what} at {saw.site} does not acquire what it saw"
            elif not _carries(last, by, tick):
                if not _releases(passed):
                    return f"{way} the {passed.what} at {passed.site} does not release what came before it"
            elif not _acquires(seen):
                return f"{way} the {seen.what} at {seen.site} does not acquire what it saw"
    return ""


def _signals(words: list[Word], events: Events, where: Any, after: int) -> Iterator[tuple[Word, Event, Event, int]]:
    """Words that a program wrote after an event and some program read later: write, read and the read's number."""
    for word in words:
        for write in _of(word, events, where, True, after):
            sent = events[write.event]
            for (_, wrote), read in word.operations.items():
                saw = events[read.event]
                fits = saw is not None and (not wrote or saw.what.startswith("atomic"))
                if fits and sent is not None and saw is not None and read.event > write.event:
                    yield word, sent, saw, read.event


def _carries(word: Word, by: int, tick: int) -> bool:
    clocks = [clock for write in word.writes for clock in write.carried.values()]
    return any(by < clock.shape[1] and clock[GENERIC, by] >= tick for clock in clocks)


def _of(word: Word, events: Events, where: Any, writes: bool, after: int) -> Iterator[Operation]:
    """The last operations of a program on a word, later than an event. An atomic both writes and reads."""
    for (_, wrote), operation in word.operations.items():
        event = events[operation.event]
        fits = wrote if writes else not wrote or (event is not None and event.what.startswith("atomic"))
        if fits and operation.event > after and event is not None and event.where == where:
            yield operation


def _releases(event: Event) -> bool:
    return "(release" in event.what or "(acq_rel" in event.what


def _acquires(event: Event | None) -> bool:
    return event is not None and ("(acquire" in event.what or "(acq_rel" in event.what)


def _who(event: Event) -> str:
    rank, launch, program = event.where
    return f"rank {rank}, {launch}, program {program},"
