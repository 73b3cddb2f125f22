"""What `fusedtp check` does beside running cases: compile kernels for the lint to judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .workers import Found, UserError

if TYPE_CHECKING:
    from .lint import Report


def lint(found: Sequence[Found], compiled: Callable[[], None]) -> tuple[bool, list[Any]]:
    """Compile the kernels of these cases for every target: whether nothing is wrong, and what to print.

    compiled   called after each compilation
    Raises UserError for a kernel that the compiler refuses.
    """
    from .lint import TARGETS, CompileCase, CompileError, check, check_cases, table
    from .lint.cases import OWN

    names = {name for each in found for name in each.kernels if not each.of_a_file}
    own = [name for name in OWN if name in names]
    files = dict.fromkeys(each.name for each in found if each.of_a_file)
    cases = [
        CompileCase(
            name.rpartition("::")[2], target, path=name.rpartition("::")[0], launch=name.rpartition("::")[2]
        )
        for name in files
        for target in TARGETS
    ]

    def done(_: Report) -> None:
        compiled()

    try:
        reports = check(own, done=done) if own else []
        reports += check_cases(cases, done=done) if cases else []
    except CompileError as error:
        raise UserError(f"{error}\n") from None
    reports = list(
        dict.fromkeys(reports)
    )  # ranks and calls whose arguments specialise otherwise to the same code
    words = _by_finding(reports)
    return not words, [table(reports), *words]


def _by_finding(reports: Sequence[Report]) -> list[str]:
    """Each finding once, with the targets that have it."""
    targets: dict[tuple[str, str], dict[str, None]] = {}
    for report in reports:
        for finding in report.findings:
            targets.setdefault((report.kernel, str(finding)), {})[report.target] = None
    return [f"{kernel} on {', '.join(on)}\n  {finding}" for (kernel, finding), on in targets.items()]
