"""The scheduler: simulated time, the event queue, and actors as greenlets that spend simulated time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from greenlet import GreenletExit, getcurrent, greenlet

from .actor import Actor
from .timeline import Segment


class Turns:
    """`now` advances from event to event. One actor, `me`, runs at a time, until it blocks. `ended` is called when an
    actor has ended."""

    def __init__(self, ended: Callable[[Actor], None]) -> None:
        self.now = 0.0
        self.me: Actor
        self.live: dict[Actor, None] = {}
        self.segments: list[Segment] = []
        self.switches = 0
        self._ended = ended
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0

    def at(self, time: float, action: Callable[[], object]) -> None:
        self._number += 1
        heapq.heappush(self._queue, (time, self._number, action))

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self.at(self.now + seconds, action)

    @property
    def pending(self) -> bool:
        """Whether any events are queued."""
        return bool(self._queue)

    def advance(self) -> None:
        """Process the next event."""
        time, _, action = heapq.heappop(self._queue)
        self.now = max(self.now, time)
        action()

    def begin(self, actor: Actor, body: Callable[[], None], delay: float = 0.0) -> None:
        """Schedule the actor to run `body`."""
        actor.greenlet = greenlet(body)
        self.live[actor] = None
        self.later(delay, lambda: self.go(actor))

    def go(self, actor: Actor) -> None:
        """Run the actor until it blocks or ends."""
        self.me = actor
        self.switches += 1
        actor.greenlet.switch()
        if actor.greenlet.dead:
            del self.live[actor]
            self._ended(actor)

    def block(self) -> None:
        """End the running actor's turn; another event will call `go` for it."""
        parent = getcurrent().parent
        assert parent is not None
        parent.switch()

    def delay(self, seconds: float) -> None:
        """Suspend the running actor for some seconds."""
        if seconds > 0:
            me = self.me
            self.later(seconds, lambda: self.go(me))
            self.block()

    def segment(self, what: str, begin: float, cause: int) -> None:
        """Record a segment of the running actor, from `begin` until now."""
        me = self.me
        if self.now > begin:
            self.segments.append(Segment(me.rank, me.name, me.program, me.sm, what, begin, self.now, cause, me.site))
            me.last = len(self.segments) - 1

    def stop(self) -> None:
        """Terminate all actors."""
        for actor in self.live:
            if actor.greenlet:
                actor.greenlet.throw(GreenletExit)
