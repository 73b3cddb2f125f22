"""All verdicts in one: who killed what, what is equivalent and why, which sites have no mutant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .census import Site
from .mutant import Mutant
from .verdict import EQUIVALENT, KILLED, Verdict


@dataclass
class Matrix:
    """What became of every mutant.

    verdicts   one for each mutant and judge, in the order of the mutants
    unjudged   mutants whose judge was not asked, with its name (a part of the matrix only)
    sites      how many the text search finds; holes: those of them without a mutant
    """

    verdicts: list[Verdict] = field(default_factory=list)
    unjudged: list[tuple[Mutant, str]] = field(default_factory=list)
    sites: int = 0
    holes: list[Site] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def survivors(self) -> list[Verdict]:
        """Each is a fault that the checks would let through, or report as something else."""
        return [verdict for verdict in self.verdicts if verdict.survived]

    @property
    def clean(self) -> bool:
        """No survivor, no hole, and nothing left unjudged."""
        return not (self.survivors or self.holes or self.unjudged)

    def table(self) -> Any:
        """Operators against results, as a rich table."""
        from rich.table import Table

        made = Table(title=f"{len({v.mutant for v in self.verdicts})} mutants")
        made.add_column("operator")
        made.add_column("judge")
        for name in ("mutants", "killed", "equivalent", "survived"):
            made.add_column(name, justify="right")
        made.add_column("by rule")
        rows = dict.fromkeys((verdict.mutant.operator, verdict.judge) for verdict in self.verdicts)
        for operator, judge in rows:
            of = [v for v in self.verdicts if (v.mutant.operator, v.judge) == (operator, judge)]
            killed = Counter(v.rule for v in of if v.result == KILLED)
            classes = Counter(v.rule for v in of if v.result == EQUIVALENT)
            survived = sum(v.survived for v in of)
            said = [f"{rule} {count}" for rule, count in killed.most_common()]
            said += [f"[dim]{name} {count}[/]" for name, count in classes.items()]
            made.add_row(
                operator, judge, str(len(of)), str(killed.total()), str(classes.total() or ""),
                f"[red]{survived}[/]" if survived else "0", ", ".join(said),
            )  # fmt: skip
        return made

    def lines(self) -> list[str]:
        """What is not as it must be, in words."""
        found = [
            f"{v.result}: {v.mutant}\n    {v.judge}: {v.where or 'no schedule showed it'}\n"
            + "".join(f"    {line}\n" for line in v.report.splitlines())
            for v in self.survivors
        ]
        found += [f"not judged by {judge}: {mutant}" for mutant, judge in self.unjudged]
        found += [
            f"no mutant of {s.operator!r}: {s.file}:{s.line} ({s.missing} missing)\n    {s.text}"
            for s in self.holes
        ]
        return found
