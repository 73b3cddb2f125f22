"""The suite of the trainer, on CPU ranks. bench/trainer.py measures; it needs all dependencies of the trainer."""

from __future__ import annotations

from fusedtp.train.stages import SCHEDULES

from ..cases import Case, named
from ..options import Plan
from ..rank import Rank
from ..rows import Row

WORLDS = (2, 4, 1)
MICROBATCHES = 8
SMOKE_SCHEDULES = ("1f1b", "dualpipev")


def cases(plan: Plan, ranks: int) -> list[Case]:
    """Cases for a world of this many ranks. None on a GPU: sleeping stages are meaningless there."""
    if plan.device != "cpu" or plan.world != "processes":
        return []
    if plan.smoke and ranks > 2:
        return []
    if ranks == 1:
        return [Case("checkpoint", "float32", 0, names=named(part="checkpoint"))]
    found = [
        Case(
            "bubble",
            "float32",
            0,
            tp=ranks,
            names=named(part="bubble", schedule=schedule, pp=ranks, m=MICROBATCHES),
        )
        for schedule in (SMOKE_SCHEDULES if plan.smoke else SCHEDULES)
    ]
    if ranks == 2:
        found.append(Case("overhead", "float32", 0, tp=2, names=named(part="overhead", model="make train", tp=2)))
    return found


def measure(rank: Rank, case: Case) -> list[Row]:
    """Result rows of a case. Collective."""
    from ..trainer import PARTS

    return PARTS[case.operation](rank, case)
