"""The result of a timed run: segments of all programs, traffic, and the critical path."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..faults import Moment, Site

COMPUTE, SEND, MEMORY, WAIT, LATENCY = "compute", "send", "memory", "wait", "latency"


class Segment(NamedTuple):
    """A time span of one program. COMPUTE contains matmuls, SEND accesses a peer's memory, MEMORY does neither, WAIT
    waits for a flag, set by a peer or by its own copies. `cause` is the index of the segment that allowed it to end
    (a wait) or to begin (the others); -1 for none.
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
    """A span of the critical path."""

    what: str
    rank: int
    launch: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The result of a run; times in seconds.

    total       end of the last program or copy
    segments    in order of their end
    sent        bytes by (source rank, destination rank), over links only
    flops       FLOPs of matmuls by rank
    memory      bytes through each rank's memory
    switches    number of times the simulator resumed an actor
    """

    total: float
    segments: tuple[Segment, ...] = field(repr=False)
    sent: dict[tuple[int, int], int]
    flops: tuple[int, ...]
    memory: tuple[int, ...]
    switches: int

    def moments(self) -> list[Moment]:
        """The segments as moments, for the simulator's timelines."""
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
        """The steps from the first work to the last end; each step is the cause of the next."""
        if not self.segments:
            return []
        at = max(range(len(self.segments)), key=lambda i: self.segments[i].end)
        steps: list[Step] = []
        until = self.segments[at].end
        while at >= 0:
            s = self.segments[at]
            cause = self.segments[s.cause] if s.cause >= 0 else None
            if s.what == WAIT and cause is not None:  # the path contains the cause of a wait, not the wait
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
        """The critical path; consecutive steps of the same kind, rank and launch are merged."""
        joined: list[Step] = []
        for step in self.critical_path():
            last = joined[-1] if joined else None
            if last and (last.what, last.rank, last.launch) == (step.what, step.rank, step.launch):
                joined[-1] = replace(last, end=step.end)
            else:
                joined.append(step)
        return joined

    def critical(self) -> dict[str, float]:
        """Seconds of the critical path by kind of step."""
        total: dict[str, float] = {}
        for step in self.critical_path():
            total[step.what] = total.get(step.what, 0.0) + step.end - step.begin
        return total
