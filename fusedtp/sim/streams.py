"""Who runs: the programs of launches and the work of hosts as actors, each on a stream of its rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet

from .case import Launch, Run, Work
from .faults import Site


@dataclass
class Poll:
    """A word that a program reads again and again."""

    site: Site
    value: bytes
    shown: str
    times: int = 1


class Actor:
    """A program of a launch, or a copy, signal or wait of a stream."""

    def __init__(self, stream: Stream, program: int, slot: int, order: int, name: str) -> None:
        self.stream, self.program, self.slot, self.order, self.name = stream, program, slot, order, name
        self.rank = stream.rank
        self.greenlet: greenlet
        self.grid = (1, 1, 1)
        self.resident = True  # takes a place; what no program does needs none
        self.seen: set[tuple[Any, ...]] = set()  # reads since it last did something
        self.polled: dict[int, Poll] = {}  # the atomics and volatile loads among them, by place
        self.repeats = 0
        self.asleep = False


class Stream:
    """A stream of a rank: work in order. Program i of every launch takes the slot first_slot + i."""

    def __init__(self, rank: int, work: Sequence[Work], first_slot: int) -> None:
        self.rank, self.work, self.first_slot = rank, deque(work), first_slot
        self.width = max((num_programs(each) for each in work), default=1)
        self.todo: deque[tuple[Work, int]] = deque()  # programs of the current work that have not started
        self.alive = 0
        self.clock: np.ndarray | None = None  # what its current work has seen of the work before
        self.ended: np.ndarray | None = None  # what all programs that ended had seen

    @property
    def slots(self) -> range:
        return range(self.first_slot, self.first_slot + self.width)


def num_programs(work: Work) -> int:
    return int(np.prod(work.shape)) if isinstance(work, Launch) else 1


def streams_of(run: Run) -> list[Stream]:
    """All streams of a run, rank by rank, in the order in which each is first used."""
    found: list[Stream] = []
    slots = 0
    for rank, work in enumerate(run.work):
        for name in dict.fromkeys(each.stream for each in work):
            found.append(Stream(rank, [each for each in work if each.stream == name], slots))
            slots += found[-1].width
    return found


class Turn:
    """Whose turn it is, and how many turns there were."""

    def __init__(self) -> None:
        self.actor: Actor | None = None
        self.step = 0

    @property
    def me(self) -> Actor:
        assert self.actor is not None
        return self.actor

    @staticmethod
    def give_up() -> None:
        """Let the scheduler choose anew; returns when it is this actor's turn again."""
        parent = getcurrent().parent
        assert parent is not None
        parent.switch()
