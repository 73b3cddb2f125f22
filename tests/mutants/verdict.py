"""What became of a mutant."""

from __future__ import annotations

from dataclasses import dataclass

from .mutant import Mutant

KILLED, EQUIVALENT = "killed", "equivalent"
SURVIVED, MISDIAGNOSED, CRASHED, OVERTIME, UNJUDGED = (
    "survived", "misdiagnosed", "crashed", "ran too long", "not judged",
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """One judge's word on one mutant.

    judge    "schedules" or "lint"
    result   killed: a rule named a fault that fits; equivalent: a check proved that it changes nothing; the rest
             count as survivors
    rule     that named it, or the class of equivalence
    where    the case and schedule, or the target, that showed it
    report   the finding in words; of a survivor what was seen instead
    """

    mutant: Mutant
    judge: str
    result: str
    rule: str = ""
    where: str = ""
    report: str = ""
    schedules: int = 0
    seconds: float = 0.0

    @property
    def survived(self) -> bool:
        return self.result not in (KILLED, EQUIVALENT)
