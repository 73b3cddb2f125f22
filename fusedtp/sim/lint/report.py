"""What the lint says of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .mlir import Frames


@dataclass(frozen=True)
class Finding:
    """A broken rule.

    line     the offending line of the compiled code (or IR)
    frames   where it comes from: (file, line) of the source, the innermost call first
    """

    rule: str
    message: str
    line: str = ""
    frames: Frames = ()

    @property
    def source(self) -> str:
        return " < ".join(f"{Path(file).name}:{line}" for file, line in self.frames)

    def __str__(self) -> str:
        where = f" at {self.source}" if self.frames else ""
        return f"{self.rule}: {self.message}{where}" + (f"\n    {self.line.strip()}" if self.line else "")


@dataclass(frozen=True)
class Report:
    """One compilation, judged. `key` names it: target/kernel/configuration.

    registers        of a thread
    spills           registers that went to memory: instructions of the SASS, or what amdgcn's metadata count
    shared_bytes     of a program
    occupancy        programs that one SM or CU holds, see targets.Target.occupancy
    """

    key: str
    kernel: str
    config: str
    target: str
    triton: str
    findings: tuple[Finding, ...] = ()
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    occupancy: int = 0
    num_warps: int = 0

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the rules it breaks."""
        return tuple(sorted({finding.rule for finding in self.findings}))


def table(reports: Sequence[Report]) -> Any:
    """The reports as a rich table."""
    from rich.table import Table

    made = Table(title=f"Triton {', '.join(sorted({report.triton for report in reports}))}")
    for name in ("target", "kernel", "config"):
        made.add_column(name)
    for name in ("warps", "registers", "spills", "shared", "programs/SM"):
        made.add_column(name, justify="right")
    made.add_column("rules")
    for report in sorted(reports, key=lambda r: (r.target, r.kernel, r.config)):
        made.add_row(
            report.target,
            report.kernel,
            report.config,
            str(report.num_warps),
            str(report.registers),
            str(report.spills),
            str(report.shared_bytes),
            str(report.occupancy),
            f"[red]{', '.join(report.broken)}[/]" if report.findings else "[green]ok[/]",
        )
    return made
