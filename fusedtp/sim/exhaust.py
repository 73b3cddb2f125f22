"""Every schedule of a small case with few preemptions, one after another."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from .case import Case
from .explore import Outcome, Schedule, attempt
from .strategies import Replay, Strategy


def exhaust(
    case: Case,
    preemptions: int = 1,
    *,
    limit: int = 10_000,
    resident: int | str | None = None,
    weak: bool = False,
) -> Outcome:
    """Every schedule of a small case that switches away at most `preemptions` times from a program that could go on.

    Stops after `limit` schedules. Source: Musuvathi and Qadeer 2007, "Iterative Context Bounding".
    """
    begin = time.monotonic()
    outcome = Outcome(case.name)
    schedule = Schedule("replay", 0, resident, weak)
    todo: list[tuple[tuple[int, ...], int]] = [((), preemptions)]
    while todo and outcome.schedules < limit:
        choices, left = todo.pop()
        replays: list[Replay] = []
        fault = attempt(case, schedule, outcome, _replayed(choices, replays))
        outcome.schedules += 1
        if fault is not None:
            outcome.fault = fault
            break
        seen = replays[-1].seen
        for step in range(len(choices), len(seen)):
            chosen, options = seen[step]
            cost = 1 if step > 0 and seen[step - 1][0] in options else 0  # it could have gone on
            if left >= cost:
                before = tuple(each for each, _ in seen[:step])
                todo.extend(((*before, other), left - cost) for other in options if other != chosen)
    outcome.seconds = time.monotonic() - begin
    return outcome


def _replayed(choices: Sequence[int], made: list[Replay]) -> Callable[..., Strategy]:
    def replay(rng: random.Random, world_size: int) -> Strategy:
        made.append(Replay(rng, world_size, choices))
        return made[-1]

    return replay
