"""Compiles cases, applies all rules of the target, and prints the reports."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

from fusedtp.targets import target

from . import ordering, resources, speed
from .compiler import CompileCase, Compiled, CompileError, compiled
from .listing import Finding

Rule = Callable[[Compiled], Iterator[Finding]]
RULES: tuple[Rule, ...] = (
    resources.spills,
    resources.shared_memory,
    resources.occupancy,
    speed.vector_width,
    speed.tensor_core,
    speed.pipelined,
    speed.carried,
)
ORDERING: tuple[Rule, ...] = (ordering.barriers, ordering.system_scope, ordering.gated_load)


@dataclass(frozen=True)
class Report:
    """The result of checking one compilation. `key` is its name: target/kernel/configuration.

    registers        per thread
    spills           spilled registers: number of instructions in the SASS, or the count in amdgcn's metadata
    shared_bytes     per program
    occupancy        programs that fit on one SM or CU, see Target.occupancy
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
        """Names of the broken rules."""
        return tuple(sorted({finding.rule for finding in self.findings}))


def judge(made: Compiled) -> Report:
    """Apply all rules to one compilation."""
    rules = RULES if made.target.name in ordering.EXECUTED else RULES + ORDERING
    findings = dict.fromkeys(finding for rule in rules for finding in rule(made))
    case, used = made.case, resources.resources(made)
    return Report(
        key=case.key if made.name == case.kernel else f"{case.key}/{made.name}",
        kernel=made.name,
        config=case.config,
        target=case.target,
        triton=made.triton,
        findings=tuple(findings),
        registers=used.registers,
        spills=used.spills,
        shared_bytes=made.shared_bytes,
        occupancy=resources.programs(made),
        num_warps=made.num_warps,
    )


def check_case(case: CompileCase) -> list[Report]:
    """Compile and check a case in this process.

    Several reports only if the case launches several kernels, or if its launches specialise a kernel differently and
    the results differ; then `config` also says which launch is the first.
    """
    places: dict[Report, str] = {}
    for made in compiled(case):
        places.setdefault(judge(made), made.place)
    count = Counter(report.kernel for report in places)
    return [
        replace(report, config=", ".join(filter(None, (report.config, place)))) if count[report.kernel] > 1 else report
        for report, place in places.items()
    ]


def check_cases(
    cases: Sequence[CompileCase], *, workers: int = 0, done: Callable[[Report], None] | None = None
) -> list[Report]:
    """Compile and check cases in fresh processes; the reports are in the order of the cases.

    workers   number of processes; they compile even if this process interprets; 0: number of cores, at most four
    done      called with each report when it is ready
    Raises ValueError for an unknown target. If the compiler refuses a kernel, raises CompileError after all others ran.
    """
    for case in cases:
        target(case.target)
    found: dict[int, list[Report]] = {}
    refused: list[CompileError] = []
    count = max(1, min(workers or min(4, os.cpu_count() or 1), len(cases)))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=_compiles) as pool:
        running = {pool.submit(check_case, case): number for number, case in enumerate(cases)}
        for each in as_completed(running):
            number = running[each]
            try:
                found[number] = each.result()
            except CompileError as error:
                refused.append(error)
            except BrokenProcessPool:
                refused.append(CompileError(f"{cases[number].key}: the compiler's process died"))
            for report in found.get(number, ()):
                if done is not None:
                    done(report)
    if refused:
        raise refused[0]
    return [report for number in sorted(found) for report in found[number]]


def _compiles() -> None:
    """Runs in a new process before it imports any kernel: a process that interprets cannot compile."""
    os.environ.pop("TRITON_INTERPRET", None)


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
        figures = (report.num_warps, report.registers, report.spills, report.shared_bytes, report.occupancy)
        verdict = f"[red]{', '.join(report.broken)}[/]" if report.findings else "[green]ok[/]"
        made.add_row(report.target, report.kernel, report.config, *map(str, figures), verdict)
    return made
