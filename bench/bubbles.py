"""What share of a pipeline step its ranks are idle, in theory: by a schedule's own order of actions, and by formula.

`ideal` plays the actions of all ranks with given costs and no communication: an action begins when its rank has ended
the one before, and when what it needs is there,

    F, stage s    F of stage s - 1
    B or I        F of the stage, and B or I of stage s + 1
    W             I of the stage

for the same microbatch. B is a whole backward pass, I its inputs' part, W its weights' part. torch leaves I of stage 0
empty and does both in W. The order is that in which the schedule was seen to run, so it is torch's own.

Formulas are of the literature, for p ranks with v stages each and m microbatches, in which a rank's forward, input and
weight passes of a microbatch take f, i and w. Idle is what they give as the time that a rank waits in a step; its share
is idle / (m (f + i + w) + idle).

    GPipe, 1F1B               (p - 1) (f + i + w)        Huang et al. 2019; Narayanan et al. 2021, section 2.2.1
    interleaved 1F1B          (p - 1) (f + i + w) / v    Narayanan et al. 2021, section 2.2.2
    looped breadth-first      (p - 1) (f + i + w) / v    Lamy-Poirier 2023, section 3
    interleaved zero bubble   (p - 1) (f + i - w) / v    ZB-H1 of Qi et al. 2024 (Zero Bubble), table 1, by v stages
    ZBV                       0 if f = i = w             Qi et al. 2024 (Controllable Memory), V-ZB
    DualPipeV                 (p - 1) (f + 2 (i + w) - 3 w) / 2    DeepSeek's DualPipe, README, without overlap

Some of torch's schedules differ from what was published under their names. Then `ideal`, not the formula, is what
their order allows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusedtp.train.timeline import BACKWARD, FORWARD, INPUT, WEIGHT, Action

Pass = tuple[str, int, int]  # kind, stage, microbatch


@dataclass(frozen=True)
class Costs:
    """Seconds that a rank takes for a microbatch, forward, inputs' and weights' gradients, of all its stages."""

    forward: float
    input: float
    weight: float

    @property
    def all(self) -> float:
        return self.forward + self.input + self.weight

    def of(self, kind: str, stage: int, stages: int) -> float:
        """Of one stage out of `stages` on a rank."""
        whole = {
            FORWARD: self.forward,
            BACKWARD: self.input + self.weight,
            INPUT: 0.0 if stage == 0 else self.input,
            WEIGHT: self.weight + (self.input if stage == 0 else 0.0),
        }
        return whole[kind] / stages


def orders_of(actions: Sequence[Action]) -> dict[int, list[Pass]]:
    """Rank -> its passes in their order, of a recorded step."""
    found: dict[int, list[Pass]] = {}
    for action in sorted(actions, key=lambda action: (action.rank, action.begin)):
        found.setdefault(action.rank, []).append((action.kind, action.stage, action.microbatch))
    return found


def play(orders: Mapping[int, Sequence[Pass]], costs: Costs, stages: int) -> float:
    """Seconds of a step without communication. stages: of a rank. Raises ValueError for an order that gets stuck."""
    last = max(stage for order in orders.values() for _, stage, _ in order)
    ends: dict[Pass, float] = {}  # B stands for I too
    at, free = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0.0)
    moved = True
    while moved:
        moved = False
        for rank, order in orders.items():
            while at[rank] < len(order):
                kind, stage, microbatch = order[at[rank]]
                needs = _needs(kind, stage, microbatch, last)
                if not all(need in ends for need in needs):
                    break
                begin = max([free[rank], *(ends[need] for need in needs)])
                free[rank] = begin + costs.of(kind, stage, stages)
                ends[(BACKWARD if kind == INPUT else kind, stage, microbatch)] = free[rank]
                at[rank] += 1
                moved = True
    if stuck := {rank: orders[rank][done] for rank, done in at.items() if done < len(orders[rank])}:
        raise ValueError(f"an order in which ranks wait for each other: {stuck}")
    return max(free.values())


def _needs(kind: str, stage: int, microbatch: int, last: int) -> list[Pass]:
    if kind == FORWARD:
        return [(FORWARD, stage - 1, microbatch)] if stage else []
    if kind == WEIGHT:
        return [(BACKWARD, stage, microbatch)]
    after = [(BACKWARD, stage + 1, microbatch)] if stage < last else []
    return [(FORWARD, stage, microbatch), *after]


def ideal(orders: Mapping[int, Sequence[Pass]], costs: Costs, stages: int) -> tuple[float, float]:
    """(share of a step that ranks are idle, seconds of the step)."""
    seconds = play(orders, costs, stages)
    work = sum(costs.of(kind, stage, stages) for order in orders.values() for kind, stage, _ in order)
    return 1 - work / (seconds * len(orders)), seconds


def formula(schedule: str, ranks: int, stages: int, microbatches: int, costs: Costs) -> float | None:
    """The share by the literature; None where it has none for these costs."""
    f, i, w = costs.forward, costs.input, costs.weight
    idle = {
        "gpipe": f + i + w,
        "1f1b": f + i + w,
        "looped_bfs": (f + i + w) / stages,
        "interleaved_1f1b": (f + i + w) / stages,
        "interleaved_zero_bubble": (f + i - w) / stages,
        "zbv_zero_bubble": 0.0 if f == i == w else None,
        "dualpipev": (f + 2 * (i + w) - 3 * w) / 2,
    }[schedule]
    if idle is None:
        return None
    waits = (ranks - 1) * idle
    return waits / (microbatches * costs.all + waits)


def measured(actions: Sequence[Action]) -> tuple[float, float]:
    """(share that ranks are idle, seconds) of a recorded step, from its first action to the end of its last."""
    ranks = len({action.rank for action in actions})
    seconds = max(action.end for action in actions) - min(action.begin for action in actions)
    busy = sum(action.end - action.begin for action in actions)
    return 1 - busy / (seconds * ranks), seconds
