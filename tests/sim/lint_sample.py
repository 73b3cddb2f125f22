"""A third of the lint's cases, which together take every branch that all cases take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fusedtp import lint

Taken = tuple[str, ...]


def takes(case: lint.CompileCase) -> Iterator[Taken]:
    """What a case covers of its kernel: a target, a variant, a switch on or off, an operand by pointer or by TMA."""
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
    """One call of every kernel on sm_90, then always the case that covers most of the rest; in the order of `cases`.

    Of equal cases, the one with the rarest combination of target and variant so far.
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
