"""What every program did in a schedule, moment by moment, where somebody asks for it."""

from __future__ import annotations

from collections import deque
from types import CodeType

import numpy as np

from .faults import Moment, Site
from .memory import Map
from .sites import site
from .streams import Actor, Turn

MAX_MOMENTS = 200_000  # the last ones count


class Recorder:
    """Notes moments if `keep`, and knows where in the source the running program stands."""

    def __init__(self, memory: Map, turn: Turn, keep: bool) -> None:
        self._memory, self._turn, self.keep = memory, turn, keep
        self._moments: deque[Moment] = deque(maxlen=MAX_MOMENTS)
        self._known: dict[CodeType, int] = {}

    @property
    def moments(self) -> tuple[Moment, ...]:
        return tuple(self._moments)

    def site(self) -> Site:
        """Where the running program stands."""
        return site(self._known)

    def note(
        self, kind: str, what: str, actor: Actor, places: np.ndarray | None = None, where: Site | None = None
    ) -> None:
        """See Moment. `places` are of one allocation; `where` is the running program's line if not given."""
        if not self.keep:
            return
        moment = Moment(self._turn.step, actor.rank, actor.name, actor.program, what, where, kind=kind)
        if places is not None and len(places):
            span = self._memory.span(places)
            moment = moment._replace(
                site=where or self.site(), tensor=span.tensor, first=span.first, last=span.last
            )
        self._moments.append(moment)
