"""What share of a pipeline step its ranks are idle, in theory: by a schedule's own order of actions, and by formula.

`ideal` plays the actions of all ranks with given costs and no communication: an action begins when its rank has ended
the one before, and when what it needs is there,

    F, stage s    F of stage s - 1
    B or I        F of the stage, and B or I of stage s + 1
    W             I of the stage

for the same microbatch. B is a whole backward pass, I its inputs' part, W its weights' part. torch leaves I of stage 0
empty and does both in W. The order is torch's own: its list, or for GPipe and 1F1B that in which a recorded step ran.
DualPipeV has pairs of F and B that are meant to overlap; torch runs one behind the other, and sends what F made when
both are done.

Formulas are of the literature, for p ranks with v stages each and m microbatches, in which a rank's forward, input and
weight passes of a microbatch take f, i and w. Idle is what they give as the time that a rank waits in a step; its share
is idle / (m (f + i + w) + idle).

    GPipe, 1F1B               (p - 1) (f + i + w)        Huang et al. 2019; Narayanan et al. 2021, section 2.2.1
    interleaved 1F1B          (p - 1) (f + i + w) / v    Narayanan et al. 2021, section 2.2.2
    looped breadth-first      (p - 1) (f + i + w) / v    Lamy-Poirier 2023, section 3
    interleaved zero bubble   (p - 1) (f + i - w) / v    ZB-H1 of Qi et al. 2024 (Zero Bubble), table 1, by v stages
    ZBV                       (p - 1) f / 2 if f = i = w: none but the last rank's later start, which only a step
                              without a common end hides    Qi et al. 2024 (Controllable Memory), V-ZB
    DualPipeV                 (p - 1) (f + 2 (i + w) - 3 w) / 2    DeepSeek's DualPipe, README, without overlap

torch's orders give these figures (tests/bench/test_bubbles.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from fusedtp.train.stages import BACKWARD, FORWARD, INPUT, WEIGHT, Action

KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)
Pass = tuple[str, int, int]  # kind, stage, microbatch
Together = tuple[Pass, ...]  # what they make is sent when the last of them is done
Orders = Mapping[int, Sequence[Together]]  # of each rank


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


def recorded_order(actions: Sequence[Action]) -> Orders:
    """That of a recorded step."""
    found: dict[int, list[Together]] = {}
    for action in sorted(actions, key=lambda action: (action.rank, action.begin)):
        found.setdefault(action.rank, []).append(((action.kind, action.stage, action.microbatch),))
    return found


def order_of(schedule: Any) -> Orders | None:
    """That of a schedule of torch with several stages a rank, which has one for all ranks; None for others."""
    if not isinstance(
        schedule, PipelineScheduleMulti
    ):  # torch 2.13's list of 1F1B lacks a forward of the last rank
        return None
    every = schedule.pipeline_order
    found: dict[int, list[Together]] = {}
    for rank, actions in every.items():
        parts = [action.sub_actions or (action,) for action in actions if action is not None]
        together = [
            tuple(_pass(each) for each in some if str(each.computation_type.value) in KINDS) for some in parts
        ]
        found[rank] = [some for some in together if some]
    return found


def _pass(action: Any) -> Pass:
    return str(action.computation_type.value), int(action.stage_index), int(action.microbatch_index)


def play(orders: Orders, costs: Costs, stages: int) -> float:
    """Seconds of a step without communication. stages: of a rank. Raises ValueError for an order that gets stuck."""
    last = max(stage for _, stage, _ in _passes(orders))
    ends: dict[Pass, float] = {}  # B stands for I too
    at, free = dict.fromkeys(orders, 0), dict.fromkeys(orders, 0.0)
    moved = True
    while moved:
        moved = False
        for rank, order in orders.items():
            while at[rank] < len(order):
                made: dict[Pass, float] = {}
                now = free[rank]
                for kind, stage, microbatch in order[at[rank]]:
                    needs, there = _needs(kind, stage, microbatch, last), made | ends
                    if not all(need in there for need in needs):
                        break
                    begin = max([now, *(there[need] for need in needs)])
                    now = begin + costs.of(kind, stage, stages)
                    made[(BACKWARD if kind == INPUT else kind, stage, microbatch)] = now
                else:
                    ends |= dict.fromkeys(made, now)
                    free[rank], moved = now, True
                    at[rank] += 1
                    continue
                break
    if stuck := {rank: orders[rank][done] for rank, done in at.items() if done < len(orders[rank])}:
        raise ValueError(f"an order in which ranks wait for each other: {stuck}")
    return max(free.values())


def _passes(orders: Orders) -> list[Pass]:
    return [each for order in orders.values() for together in order for each in together]


def _needs(kind: str, stage: int, microbatch: int, last: int) -> list[Pass]:
    if kind == FORWARD:
        return [(FORWARD, stage - 1, microbatch)] if stage else []
    if kind == WEIGHT:
        return [(BACKWARD, stage, microbatch)]
    after = [(BACKWARD, stage + 1, microbatch)] if stage < last else []
    return [(FORWARD, stage, microbatch), *after]


def ideal(orders: Orders, costs: Costs, stages: int) -> tuple[float, float]:
    """(share of a step that ranks are idle, seconds of the step)."""
    seconds = play(orders, costs, stages)
    work = sum(costs.of(kind, stage, stages) for kind, stage, _ in _passes(orders))
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
        "zbv_zero_bubble": f / stages if f == i == w else None,
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
