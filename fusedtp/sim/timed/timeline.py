"""What a timed run gives: who did what when, what moved, and what the end waited for."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..faults import Moment, Site

COMPUTE, SEND, MEMORY, WAIT, LATENCY = "compute", "send", "memory", "wait", "latency"


class Segment(NamedTuple):
    """A stretch of one program: COMPUTE has products in it, SEND stores or loads at a peer, MEMORY neither, WAIT
    is for a flag, a peer's or its own copies. `cause` is the index of the segment without which it could not end
    (a wait) or begin; -1 for none.
    """

    rank: int
    launch: str
    program: int
    sm: int
    what: str
    begin: float
    end: float
    cause: int
    site: Site | None = None


@dataclass(frozen=True)
class Step:
    """A stretch of the critical path."""

    what: str
    rank: int
    launch: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A run's result; times in seconds.

    total       end of the last program or copy
    segments    in order of their end
    sent        bytes by (source rank, destination rank), over links only
    flops       products by rank
    memory      bytes through each rank's memory
    switches    how often the simulator went from one program to another
    """

    total: float
    segments: tuple[Segment, ...] = field(repr=False)
    sent: dict[tuple[int, int], int]
    flops: tuple[int, ...]
    memory: tuple[int, ...]
    switches: int

    def moments(self) -> list[Moment]:
        """The segments as the simulator's timelines draw them."""
        kinds = {SEND: "copy", WAIT: "wait"}
        ends: dict[tuple[int, str, int], float] = {}
        found = []
        for i, s in enumerate(self.segments):
            who = s.rank, s.launch, s.program
            if who not in ends:
                found.append(Moment(i, *who, "starts", None, s.begin, s.begin, "start"))
            ends[who] = s.end
            found.append(Moment(i, *who, s.what, s.site, s.begin, s.end, kinds.get(s.what, s.what)))
        last = len(self.segments)
        return found + [Moment(last, *who, "ends", None, end, end, "end") for who, end in ends.items()]

    def busy(self) -> dict[tuple[int, str], float]:
        """Seconds of programs by (rank, what)."""
        total: Counter[tuple[int, str]] = Counter()
        for s in self.segments:
            total[s.rank, s.what] += s.end - s.begin  # type: ignore[assignment]
        return dict(total)

    def critical_path(self) -> list[Step]:
        """From the first work to the last end, each step the one without which the next could not have come."""
        if not self.segments:
            return []
        at = max(range(len(self.segments)), key=lambda i: self.segments[i].end)
        steps: list[Step] = []
        until = self.segments[at].end
        while at >= 0:
            s = self.segments[at]
            cause = self.segments[s.cause] if s.cause >= 0 else None
            if s.what == WAIT and cause is not None:  # what ended it is on the path, it is not
                if until > cause.end:
                    steps.append(Step(LATENCY, s.rank, s.launch, cause.end, until))
                until = min(until, cause.end)
            else:
                if until > s.end:
                    steps.append(Step(LATENCY, s.rank, s.launch, s.end, until))
                steps.append(Step(s.what, s.rank, s.launch, s.begin, min(until, s.end)))
                until = s.begin
            at = s.cause
        if until > 0:
            steps.append(Step(LATENCY, steps[-1].rank, steps[-1].launch, 0.0, until))
        return steps[::-1]

    def critical_stretches(self) -> list[Step]:
        """The critical path with neighbours joined that are the same thing of the same rank and launch."""
        joined: list[Step] = []
        for step in self.critical_path():
            last = joined[-1] if joined else None
            if last and (last.what, last.rank, last.launch) == (step.what, step.rank, step.launch):
                joined[-1] = replace(last, end=step.end)
            else:
                joined.append(step)
        return joined

    def critical(self) -> dict[str, float]:
        """Seconds of the critical path by what."""
        total: dict[str, float] = {}
        for step in self.critical_path():
            total[step.what] = total.get(step.what, 0.0) + step.end - step.begin
        return total
