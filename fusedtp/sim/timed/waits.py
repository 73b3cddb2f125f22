"""Tracks which programs wait for which words of memory, and wakes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..faults import Fault, Site, Wait
from .actor import Actor
from .source import HOST
from .timeline import WAIT
from .turns import Turns
from .words import Words

SAME_READS = 2  # rounds over all polled words before a program counts as waiting
VAIN_ROUNDS = 3


class Waits:
    """A program that keeps reading the same values sleeps until one of the words that it polls changes.

    site   returns the current site of the running program
    look   seconds from the change until the waiter has seen it
    """

    def __init__(self, turns: Turns, words: Words, site: Callable[[], Site], look: float) -> None:
        self._turns, self._words, self._site, self._look = turns, words, site, look
        self._sleepers: dict[int, list[Actor]] = {}
        self._vain = 0

    def progress(self) -> None:
        """Something happened that other programs may observe."""
        self._vain = 0

    def again(self, me: Actor, addresses: Sequence[int], values: Sequence[int]) -> bool:
        """Record the values that a program polls together. Returns whether it has repeated itself enough to wait.

        A report names the word with the lowest value in the last poll: flags count up.
        """
        me.address = min(zip(values, addresses, strict=True))[1]
        for address, value in zip(addresses, values, strict=True):
            if me.polled.get(address) == value:
                me.repeats += 1
            else:
                if not me.polled or address in me.polled:
                    me.since = self._turns.now
                me.polled[address], me.repeats = value, 0
        return me.repeats > SAME_READS * len(me.polled)

    def sleep(self, me: Actor, addresses: Sequence[int]) -> None:
        """The running actor sleeps until one of the words changes."""
        turns = self._turns
        me.asleep, me.site = True, self._site()
        for address in addresses:
            self._sleepers.setdefault(address, []).append(me)
        turns.block()
        turns.segment(WAIT, me.since, me.woken_by if me.woken_by >= 0 else me.last)
        me.site = None
        me.progressed(turns.now)
        turns.delay(self._look)

    def wake(self, address: int, cause: int) -> None:
        """The word at `address` has changed."""
        for actor in self._sleepers.pop(address, ()):
            self._rouse(actor, cause)

    def _rouse(self, actor: Actor, cause: int) -> None:
        if actor.asleep:
            actor.asleep, actor.woken_by = False, cause
            for others in self._sleepers.values():
                if actor in others:
                    others.remove(actor)
            self._turns.later(0.0, lambda: self._turns.go(actor))

    def once_more(self) -> bool:
        """No events are left. Wake all sleepers for a few more rounds: one may read a word without waiting for it."""
        self._vain += 1
        sleeping = [actor for actor in self._turns.live if actor.asleep]
        if self._vain <= VAIN_ROUNDS:
            for actor in sleeping:
                self._rouse(actor, -1)
        return self._turns.pending

    def deadlock(self, queued: int) -> Fault:
        """The fault with all waits; `queued` programs have not even started."""
        waits = []
        for actor in self._turns.live:
            if actor.asleep:
                name, index = self._words.name(actor.address)
                seen = str(actor.polled.get(actor.address, "?"))
                where = actor.site or HOST
                waits.append(Wait(actor.rank, actor.name, actor.program, where, name, index, seen))
        message = f"{len(waits)} programs wait and no other can run"
        if queued:
            message += f"; {queued} not started yet"
        return Fault("deadlock", message, waits=tuple(waits))
