"""A third of the lint's cases, which between them take every branch that all of them take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fusedtp import lint

Taken = tuple[str, ...]


def takes(case: lint.CompileCase) -> Iterator[Taken]:
    """What a case shows of its kernel: a target, a variant, a switch on or off, an operand by pointer or descriptor."""
    yield case.kernel, "target", case.target
    yield case.kernel, "variant", case.config
    launch = case.make()
    constants = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
    for name, value in launch.args.items():
        if name not in constants:
            yield case.kernel, name, type(value).__name__
        elif isinstance(value, bool) or not isinstance(value, (int, float)):  # a number is a size
            yield case.kernel, name, str(value)


def sample(cases: Sequence[lint.CompileCase]) -> list[lint.CompileCase]:
    """Of every kernel one call on sm_90, then always a case that takes most of what is left.

    Of those the one whose target and variant were together least often. In the order of `cases`.
    """
    taken = {case.key: set(takes(case)) for case in cases}
    chosen = {case.key: case for case in cases if case.target == "sm_90" and case.config in ("", "bf16")}
    left = set[Taken]().union(*taken.values()).difference(*(taken[key] for key in chosen))
    together = Counter((case.target, case.config) for case in chosen.values())
    while left:
        best = max(cases, key=lambda case: (len(taken[case.key] & left), -together[case.target, case.config]))
        chosen[best.key] = best
        left -= taken[best.key]
        together[best.target, best.config] += 1
    return [case for case in cases if case.key in chosen]
