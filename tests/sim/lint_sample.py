"""A fifth of the lint's cases, which together take every branch and every dtype that all cases take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fusedtp import lint
from fusedtp.checks.lint import MAKES_FP8, OWN, WITH_FP8

Taken = tuple[str, ...]


def targets_of(kernel: str) -> set[str]:
    """The targets of a kernel in the sample: sm_90, and one of the others, in turn from kernel to kernel."""
    others = [t for t in lint.TARGETS if t != "sm_90" and (t in WITH_FP8 or kernel not in MAKES_FP8)]
    return {"sm_90", others[list(OWN).index(kernel) % len(others)]}


def takes(case: lint.CompileCase) -> Iterator[Taken]:
    """What a case covers of its kernel: a target, a switch on or off, an operand's dtype, by pointer or by TMA."""
    if case.target in targets_of(case.kernel):
        yield case.kernel, "target", case.target
    launch = case.make()
    constants = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
    for name, value in launch.args.items():
        if name not in constants:
            yield case.kernel, name, type(value).__name__, str(getattr(value, "dtype", ""))
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
