"""All mutants of the kernels."""

from __future__ import annotations

from functools import cache

from . import moves, operators, places
from .mutant import Mutant
from .operators import Operator
from .source import Sources

OPERATORS: tuple[Operator, ...] = (
    operators.drop_wait,
    operators.drop_notify,
    operators.weaken_order,
    operators.narrow_scope,
    operators.drop_barrier,
    operators.one_buffer,
    operators.low_epoch,
    operators.compare_wrong,
    places.wrong_peer,
    places.wrong_slot,
    moves.notify_early,
    moves.wait_late,
    moves.wait_in_loop,
    operators.tail_skipped,
    moves.empty_shard,
    operators.reversed_stages,
)


def mutants(sources: Sources) -> list[Mutant]:
    """One for each site of each operator, in the order of OPERATORS."""
    return [mutant for operator in OPERATORS for mutant in made_by(operator, sources)]


@cache
def made_by(operator: Operator, sources: Sources) -> tuple[Mutant, ...]:
    """One for each site of this operator."""
    return tuple(operator(sources))
