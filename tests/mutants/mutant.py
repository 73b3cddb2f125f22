"""One mutant: which site of the kernels' source, what stands there instead, and what a report of it must say."""

from __future__ import annotations

from dataclasses import dataclass

from .source import Edit


@dataclass(frozen=True)
class Mutant:
    """A copy of the kernels with one site changed.

    operator   a name of OPERATORS
    file, line, function   the site
    before, after          its text, in short
    expects    a name of fit.EXPECTED: what its faults look like
    judges     "schedules", and "lint" for what concerns memory order; each must find it
    """

    operator: str
    file: str
    line: int
    column: int
    function: str
    before: str
    after: str
    edits: tuple[Edit, ...]
    expects: str
    judges: tuple[str, ...] = ("schedules",)

    @property
    def name(self) -> str:
        return f"{self.operator} @ {self.file}:{self.line}:{self.column}"

    def __str__(self) -> str:
        return f"{self.name} in {self.function}: {self.before}  ->  {self.after}"


def short(text: str) -> str:
    """One line of at most 60 characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 60 else flat[:57] + "..."
