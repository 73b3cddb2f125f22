"""Who waits: a program that repeats reads which return what they returned before sleeps until one of them changes.

If no program is awake, that is a deadlock. Some programs read the same word often without waiting for it, so all are
roused a few times first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .detector import Detector
from .faults import Fault, Site, Wait
from .memory import Map
from .recorder import Recorder
from .streams import Actor, Poll, Turn

SAME_READS = 3  # times round a loop of reads that return the same before a program counts as waiting
VAIN_ROUNDS = 8


class Spinning:
    """What programs have read since they last did something, and which of them sleep at which word."""

    def __init__(self, turn: Turn, recorder: Recorder) -> None:
        self._turn, self._recorder = turn, recorder
        self._sleepers: dict[int, set[Actor]] = {}
        self._vain_rounds = 0

    def wrote(self) -> None:
        """The running program did something that others can see: it does not spin."""
        me = self._turn.me
        me.seen.clear()
        me.polled.clear()
        me.repeats = 0
        self._vain_rounds = 0

    def read(self, places: np.ndarray, value: np.ndarray, *, poll: bool) -> None:
        """The running program read without changing anything; poll: by an atomic or a volatile load."""
        me = self._turn.me
        first = int(places[0])
        key: tuple[Any, ...] = (first, len(places))
        if poll:
            site, seen = self._recorder.site(), value.tobytes()
            key = (site, first, seen)
            known = me.polled.get(first)
            if known is None or known.value != seen:
                me.polled[first] = Poll(site, seen, str(value.ravel()[0]))
            else:
                known.times += 1
        if key not in me.seen:
            me.seen.add(key)
            me.repeats = 0
        elif poll:
            me.repeats += 1
            if me.repeats > SAME_READS * len(me.polled):
                self._sleep()

    def wait(self, place: int, site: Site, shown: str) -> None:
        """The running actor sleeps until this word changes."""
        self._turn.me.polled[place] = Poll(site, b"", shown)
        self._sleep()

    def _sleep(self) -> None:
        me = self._turn.me
        me.asleep = True
        for place, poll in me.polled.items():
            self._sleepers.setdefault(place, set()).add(me)
            self._recorder.note("wait", f"waits, sees {poll.shown}", me, np.array([place]), poll.site)
        self._turn.give_up()

    def changed(self, places: np.ndarray, itemsize: int) -> None:
        """These words have new values that all can see: wake who waits for one."""
        if not self._sleepers:
            return
        low, high = int(places.min()), int(places.max()) + itemsize
        for place in [p for p in self._sleepers if low <= p < high]:
            for actor in sorted(self._sleepers.pop(place), key=lambda each: each.order):
                self._rouse(actor)

    def _rouse(self, actor: Actor) -> None:
        actor.asleep = False
        self._recorder.note("wake", "wakes", actor)
        actor.seen.clear()
        actor.repeats = 0
        for waiting in self._sleepers.values():
            waiting.discard(actor)

    def once_more(self, everyone: Iterable[Actor]) -> bool:
        """All sleep: wake them to look again. False if that has failed too often, or there are none."""
        self._vain_rounds += 1
        if self._vain_rounds > VAIN_ROUNDS:
            return False
        actors = list(everyone)
        for actor in actors:
            self._rouse(actor)
        return bool(actors)


def deadlock(live: Sequence[Actor], memory: Map, detector: Detector, not_started: Sequence[str]) -> Fault:
    """What every live program waits for, and who wrote it last; not_started: words for programs that are to come."""
    waits = []
    for actor in live:
        if not actor.polled:
            continue
        place, poll = max(actor.polled.items(), key=lambda item: item[1].times)
        span, by = memory.span(np.array([place])), detector.last_writer(place)
        writer = f"last written by rank {by.rank}, {by.name}, program {by.program}" if by else ""
        waits.append(
            Wait(
                actor.rank, actor.name, actor.program, poll.site, span.tensor, span.first, poll.shown, writer
            )
        )
    message = f"{len(waits)} programs wait and no other can run"
    if not_started:
        message += "; not started yet: " + ", ".join(not_started)
    return Fault("deadlock", message, waits=tuple(waits))
