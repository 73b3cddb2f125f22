"""Scheduling strategies. A strategy picks the next program among the runnable ones; all draw from one seed.

A starved rank or program runs only if nothing else can. pct has fixed priorities, lowered at d random points, and finds
a bug of depth d with probability at least 1 / (n k^(d-1)) for n programs and k steps (Burckhardt et al. 2010, "A
Randomized Scheduler with Probabilistic Guarantees of Finding Bugs").
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

Switch = tuple[int, list[int]]  # the program chosen and all runnable programs, each by its `order`


class Runnable(Protocol):
    """The attributes of a program that strategies use."""

    rank: int
    slot: int
    order: int  # programs are numbered in the order of their start


class Strategy:
    """`pick` returns an index into `runnable`, which is not empty and is sorted by `order`."""

    def __init__(self, rng: random.Random, world_size: int) -> None:
        self.rng = rng

    def pick(self, runnable: Sequence[Runnable], current: Runnable | None) -> int:
        return self.rng.randrange(len(runnable))


class RoundRobin(Strategy):
    def pick(self, runnable: Sequence[Runnable], current: Runnable | None) -> int:
        return next((i for i, each in enumerate(runnable) if current is None or each.order > current.order), 0)


class RunToBlock(Strategy):
    def pick(self, runnable: Sequence[Runnable], current: Runnable | None) -> int:
        return runnable.index(current) if current in runnable else self.rng.randrange(len(runnable))


class StarveRank(Strategy):
    def __init__(self, rng: random.Random, world_size: int) -> None:
        super().__init__(rng, world_size)
        self.victim = rng.randrange(world_size)

    def pick(self, runnable: Sequence[Runnable], current: Runnable | None) -> int:
        others = [i for i, each in enumerate(runnable) if each.rank != self.victim]
        return self.rng.choice(others or range(len(runnable)))


class StarveProgram(Strategy):
    def __init__(self, rng: random.Random, world_size: int) -> None:
        super().__init__(rng, world_size)
        self.number = rng.randrange(1 << 16)

    def pick(self, runnable: Sequence[Runnable], current: Runnable | None) -> int:
        slots = 1 + max(each.slot for each in runnable)
        others = [i for i, each in enumerate(runnable) if each.slot != self.number % slots]
        return self.rng.choice(others) if others else 0


class Pct(Strategy):
    CHANGES = 3
    STEPS = 600  # the change points are drawn among the first STEPS switches

    def __init__(self, rng: random.Random, world_size: int) -> None:
        super().__init__(rng, world_size)
        self._priority: dict[int, float] = {}
        self._changes = sorted(rng.randrange(1, self.STEPS) for _ in range(self.CHANGES))
        self._steps = 0

    def pick(self, runnable: Sequence[Runnable], current: Runnable | None) -> int:
        self._steps += 1
        for each in runnable:
            self._priority.setdefault(each.order, 1 + self.rng.random())
        best = max(range(len(runnable)), key=lambda i: self._priority[runnable[i].order])
        if self._changes and self._steps >= self._changes[0]:
            self._priority[runnable[best].order] = len(self._changes) / (1 + self.CHANGES)
            self._changes.pop(0)
        return best


class Replay(Strategy):
    """Follows `choices` (`order` of programs), then run_to_block; records each choice and its options in `seen`."""

    def __init__(
        self, rng: random.Random, world_size: int, choices: Sequence[int] = (), seen: list[Switch] | None = None
    ) -> None:
        super().__init__(rng, world_size)
        self.choices, self.seen = choices, [] if seen is None else seen

    def pick(self, runnable: Sequence[Runnable], current: Runnable | None) -> int:
        orders = [each.order for each in runnable]
        wanted = [*self.choices[len(self.seen) :][:1], *([current.order] if current else [])]
        chosen = next((order for order in wanted if order in orders), orders[0])
        self.seen.append((chosen, orders))
        return orders.index(chosen)


STRATEGIES: dict[str, type[Strategy]] = {
    "random": Strategy, "round_robin": RoundRobin, "run_to_block": RunToBlock, "starve_rank": StarveRank,
    "starve_program": StarveProgram, "pct": Pct, "replay": Replay,
}  # fmt: skip
DEFAULT = ("random", "pct", "starve_rank", "starve_program", "run_to_block", "round_robin")
