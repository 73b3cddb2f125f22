"""Idle share (bubble) of a pipeline step: measured in a recorded step, and implied by the order of passes alone.

`ideal` simulates the passes of all ranks with given costs and no communication. A pass begins when its rank has
finished the previous one and its dependencies are done,

    F, stage s    F of stage s - 1
    B or I        F of the stage, and B or I of stage s + 1
    W             I of the stage

for the same microbatch. B is a whole backward pass, I its dgrad, W its wgrad. The order is torch's own: its list of
actions, or for GPipe and 1F1B the order of a recorded step. DualPipeV has pairs of F and B that are meant to overlap;
torch runs them one after the other, and sends the output of F when both are done.

`shares` takes the costs from the step itself: the mean of each kind of pass of each stage. Idle time beyond the ideal
comes from sends and receives, and from passes of one kind that differ in length.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from fusedtp.train.stages import BACKWARD, FORWARD, INPUT, WEIGHT, Action

KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)
Pass = tuple[str, int, int]  # kind, stage, microbatch
Together = tuple[Pass, ...]  # outputs are sent when the last pass of the tuple is done
Orders = Mapping[int, Sequence[Together]]  # rank -> its passes in order
Cost = Callable[[str, int], float]  # (kind, stage) -> seconds of such a pass

# -- orders ------------------------------------------------------------------------------------------------------------


def recorded_order(actions: Sequence[Action]) -> Orders:
    """The order of passes in a recorded step."""
    found: dict[int, list[Together]] = {}
    for action in sorted(actions, key=lambda action: (action.rank, action.begin)):
        found.setdefault(action.rank, []).append(((action.kind, action.stage, action.microbatch),))
    return found


def order_of(schedule: Any) -> Orders | None:
    """The order of passes in a torch schedule with several stages per rank; None for other schedules."""
    if not isinstance(schedule, PipelineScheduleMulti):
        return None  # torch 2.13's list of 1F1B lacks a forward of the last rank
    every = schedule.pipeline_order
    found: dict[int, list[Together]] = {}
    for rank, actions in every.items():
        parts = [action.sub_actions or (action,) for action in actions if action is not None]
        together = [tuple(_pass(each) for each in some if str(each.computation_type.value) in KINDS) for some in parts]
        found[rank] = [some for some in together if some]
    return found


def _pass(action: Any) -> Pass:
    return str(action.computation_type.value), int(action.stage_index), int(action.microbatch_index)


# -- the ideal step ----------------------------------------------------------------------------------------------------


def play(orders: Orders, cost: Cost) -> float:
    """Seconds of a step without communication. Raises ValueError for an order that deadlocks."""
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
                    needs, there = _needs(kind, stage, microbatch, last), ChainMap(made, ends)
                    if not all(need in there for need in needs):
                        break
                    begin = max([now, *(there[need] for need in needs)])
                    now = begin + cost(kind, stage)
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


def ideal(orders: Orders, cost: Cost) -> tuple[float, float]:
    """(idle share of a step, seconds of the step). Raises ValueError like `play`."""
    seconds = play(orders, cost)
    work = sum(cost(kind, stage) for kind, stage, _ in _passes(orders))
    return 1 - work / (seconds * len(orders)) if seconds else 0.0, seconds


# -- a recorded step ---------------------------------------------------------------------------------------------------


def measured(actions: Sequence[Action]) -> tuple[float, float]:
    """(idle share, seconds) of a recorded step, from its first action to the end of its last.

    Raises ValueError for no actions.
    """
    ranks = len({action.rank for action in actions})
    seconds = max(action.end for action in actions) - min(action.begin for action in actions)
    busy = sum(action.end - action.begin for action in actions)
    return 1 - busy / (seconds * ranks) if seconds else 0.0, seconds


def mean_cost(actions: Sequence[Action]) -> Cost:
    """Mean seconds of a pass in a recorded step, by kind and stage, over its microbatches."""
    took: dict[tuple[str, int], list[float]] = {}
    for action in actions:
        took.setdefault((action.kind, action.stage), []).append(action.end - action.begin)
    means = {key: sum(seconds) / len(seconds) for key, seconds in took.items()}
    return lambda kind, stage: means[kind, stage]


def shares(actions: Sequence[Action], schedule: Any = None) -> tuple[float, float]:
    """(idle share of a recorded step, idle share implied by its order of passes and their mean costs alone).

    schedule: torch's schedule, which knows pairs of passes. Its order is used if it lists exactly the passes that ran.
    Raises ValueError for no actions, and for an order that deadlocks.
    """
    orders, ran = order_of(schedule), recorded_order(actions)
    if orders is None or sorted(_passes(orders)) != sorted(_passes(ran)):
        orders = ran
    return measured(actions)[0], ideal(orders, mean_cost(actions))[0]
