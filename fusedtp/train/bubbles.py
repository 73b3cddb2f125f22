"""What share of a pipeline's step its ranks are idle: as it was recorded, and by its order of passes alone.

`ideal` plays the passes of all ranks with given costs and no communication: a pass begins when its rank has ended the
one before, and when what it needs is there,

    F, stage s    F of stage s - 1
    B or I        F of the stage, and B or I of stage s + 1
    W             I of the stage

for the same microbatch. B is a whole backward pass, I its inputs' part, W its weights' part. The order is torch's own:
its list, or for GPipe and 1F1B that in which a recorded step ran. DualPipeV has pairs of F and B that are meant to
overlap; torch runs one behind the other, and sends what F made when both are done.

`shares` takes the costs from the step itself: the mean of each kind of pass of each stage. What a step is idle beyond
that, it spends on sends and receives, and because passes of one kind are not equally long.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from fusedtp.train.stages import BACKWARD, FORWARD, INPUT, WEIGHT, Action

KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)
Pass = tuple[str, int, int]  # kind, stage, microbatch
Together = tuple[Pass, ...]  # what they make is sent when the last of them is done
Orders = Mapping[int, Sequence[Together]]  # of each rank
Cost = Callable[[str, int], float]  # seconds of a kind of pass of a stage

# -- orders ------------------------------------------------------------------------------------------------------------


def recorded_order(actions: Sequence[Action]) -> Orders:
    """That of a recorded step."""
    found: dict[int, list[Together]] = {}
    for action in sorted(actions, key=lambda action: (action.rank, action.begin)):
        found.setdefault(action.rank, []).append(((action.kind, action.stage, action.microbatch),))
    return found


def order_of(schedule: Any) -> Orders | None:
    """That of a schedule of torch with several stages a rank, which has one for all ranks; None for others."""
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


# -- their theory ------------------------------------------------------------------------------------------------------


def play(orders: Orders, cost: Cost) -> float:
    """Seconds of a step without communication. Raises ValueError for an order that gets stuck."""
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
    """(share of a step that ranks are idle, seconds of the step). Raises ValueError as `play` does."""
    seconds = play(orders, cost)
    work = sum(cost(kind, stage) for kind, stage, _ in _passes(orders))
    return 1 - work / (seconds * len(orders)) if seconds else 0.0, seconds


# -- a recorded step ---------------------------------------------------------------------------------------------------


def measured(actions: Sequence[Action]) -> tuple[float, float]:
    """(share that ranks are idle, seconds) of a recorded step, from its first action to the end of its last.

    Raises ValueError for no actions.
    """
    ranks = len({action.rank for action in actions})
    seconds = max(action.end for action in actions) - min(action.begin for action in actions)
    busy = sum(action.end - action.begin for action in actions)
    return 1 - busy / (seconds * ranks) if seconds else 0.0, seconds


def mean_cost(actions: Sequence[Action]) -> Cost:
    """What a pass of a kind and a stage took in a recorded step, on average over its microbatches."""
    took: dict[tuple[str, int], list[float]] = {}
    for action in actions:
        took.setdefault((action.kind, action.stage), []).append(action.end - action.begin)
    means = {key: sum(seconds) / len(seconds) for key, seconds in took.items()}
    return lambda kind, stage: means[kind, stage]


def shares(actions: Sequence[Action], schedule: Any = None) -> tuple[float, float]:
    """(share of a recorded step that ranks were idle, the same by its order of passes and their mean costs alone).

    schedule: torch's, which knows pairs of passes. Its list counts where it names just what ran. Raises ValueError for
    no actions, and for an order that gets stuck.
    """
    orders, ran = order_of(schedule), recorded_order(actions)
    if orders is None or sorted(_passes(orders)) != sorted(_passes(ran)):
        orders = ran
    return measured(actions)[0], ideal(orders, mean_cost(actions))[0]
