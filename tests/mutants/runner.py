"""Judge all mutants, or some: schedules in worker processes that interpret, the lint in one that compiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from pathlib import Path

from fusedtp.checks.lint import OWN
from fusedtp.checks.workers import pool

from .census import uncovered, unlisted
from .compiled import try_compiled
from .equivalent import equivalence
from .generate import mutants
from .kept import Kept
from .matrix import Matrix
from .mutant import Mutant
from .source import Sources
from .trials import tried
from .trying import try_mutant
from .verdict import EQUIVALENT, SURVIVED, Verdict

SCHEDULES = 12  # of the three calls of each operation; the other trials take half as many
CPU_SECONDS = 300.0  # of one mutant; one that no schedule shows goes through all trials of all kernels
QUICK = 18  # every so many mutants


def quick(chosen: Sequence[Mutant], sources: Sources) -> list[Mutant]:
    """A sample that CI has time for: the first mutant of every operator, and every QUICK-th.

    Without those that are equivalent: they go through every trial there is.
    """
    chosen = [mutant for mutant in chosen if equivalence(mutant, sources) is None]
    first = {mutant.operator: mutant for mutant in reversed(chosen)}
    return [m for i, m in enumerate(chosen) if i % QUICK == 0 or first[m.operator] is m]


def run(
    *,
    wanted: Callable[[Mutant], bool] | None = None,
    judges: Sequence[str] = ("schedules", "lint"),
    sample: bool = False,
    workers: int = 2,
    schedules: int = SCHEDULES,
    cpu_seconds: float = CPU_SECONDS,
    oldest_python: str | None = None,
    folder: Path | None = None,
    keep: Path | None = None,
    progress: Callable[[Verdict, int, int], None] | None = None,
) -> Matrix:
    """Make the kernels' mutants and judge them.

    wanted          which mutants; None: all. `sample`: of those, some that CI has time for
    judges          leaving one out leaves its mutants unjudged, and the matrix not clean
    workers         processes that interpret at once
    oldest_python   an interpreter whose Triton is the oldest supported one, for the lint; None: this one
    folder          the kernels' source; None: the installed one
    keep            a file to which each verdict is added as it comes, and from which a run that was broken off goes on;
                    verdicts on other sources are passed over
    progress        called with each verdict, how many there are and how many there will be
    """
    begin = time.monotonic()
    sources = Sources.read(folder)
    everything = mutants(sources)
    chosen = [mutant for mutant in everything if wanted is None or wanted(mutant)]
    chosen = quick(chosen, sources) if sample else chosen
    sites, holes = uncovered(sources.texts, everything)
    matrix = Matrix(sites=sites, holes=[*holes, *unlisted(sources.texts, tried, OWN)])
    kept = Kept(keep, sources, f"{schedules} {oldest_python}")
    tasks = [(mutant, judge) for mutant in chosen for judge in mutant.judges]
    matrix.unjudged = [task for task in tasks if task[1] not in judges]
    count = len(tasks) - len(matrix.unjudged)

    def done(verdict: Verdict) -> None:
        if verdict.result == SURVIVED and (proof := equivalence(verdict.mutant, sources)):
            verdict = replace(verdict, result=EQUIVALENT, rule=proof)
        kept.add(verdict)
        matrix.verdicts.append(verdict)
        if progress is not None:
            progress(verdict, len(matrix.verdicts), count)

    todo = []
    for mutant, judge in tasks:
        if judge in judges and (known := kept.verdict(mutant, judge)):
            matrix.verdicts.append(known)
        elif judge in judges:
            todo.append((mutant, judge))
    if any(judge == "schedules" for _, judge in todo):
        with pool(workers) as processes:
            given = (sources.texts, schedules, cpu_seconds)
            running = [processes.submit(try_mutant, m, *given) for m, judge in todo if judge == "schedules"]
            for future in as_completed(running):
                done(future.result())
    ordering = [mutant for mutant, judge in todo if judge == "lint"]
    if ordering:
        try_compiled(ordering, sources, oldest_python, done)
    order = {task: i for i, task in enumerate(tasks)}
    matrix.verdicts.sort(key=lambda verdict: order[verdict.mutant, verdict.judge])
    matrix.seconds = time.monotonic() - begin
    return matrix
