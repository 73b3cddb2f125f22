"""python -m tests.seeded: put faults into the kernels one at a time, print which are found. Takes hours.

A run goes on from the verdicts that are kept. Exit code 0 if every fault tried so far is found or rightly called
equivalent, 1 if not, 2 for bad input.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fusedtp.checks.workers import cores

from .trying import Task, run, tasks
from .verdicts import KEPT, KINDS, Kept, load, save


@dataclass(frozen=True)
class Options:
    """Put faults into the library's kernels, one at a time, and print which are found."""

    only: str = ""
    """Tasks with these words in their name, such as "drop", "weaken order" or "ptx | meet_kernel"."""
    report: bool = False
    """Print what is known, run nothing."""
    minutes: float | None = None
    """End after that long. The next run goes on."""
    workers: int = cores()
    """Processes. Default: one a core."""
    keep: Path = KEPT
    """The file that is read, and that takes each verdict as it comes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = tyro.cli(Options, prog="python -m tests.seeded", args=argv)
    chosen, kept = tasks(options.only), load(options.keep)
    if not chosen:
        print(f"python -m tests.seeded: error: --only {options.only}: no task is named so", file=sys.stderr)
        return 2
    left = [task for task in chosen if not fresh(task, kept)]
    if left and not options.report:
        coming = run(left, options.workers, options.minutes and 60 * options.minutes)
        for task, made in track(
            coming, "seeded faults", len(left), console=Console(stderr=True), transient=True
        ):
            save(options.keep, {task.name: made})
            kept[task.name] = made
    return report(chosen, kept, Console(width=None if sys.stdout.isatty() else 120))


def fresh(task: Task, kept: dict[str, Kept]) -> bool:
    """Whether the task's verdicts are known, of the kernels as they are."""
    return task.name in kept and kept[task.name].key == task.key


def report(chosen: Sequence[Task], kept: dict[str, Kept], console: Console) -> int:
    """Print what is known of these tasks and return the exit code."""
    done = {task.name: kept[task.name] for task in chosen if fresh(task, kept)}
    verdicts = [verdict for each in done.values() for verdict in each.verdicts]
    named = [(v.fault, v.kind) for v in verdicts] + [
        (t.name, "not tried yet") for t in chosen if t.name not in done
    ]
    counts = Counter((name.split(" | ")[0], kind) for name, kind in named)
    for (operator, kind), count in [*counts.items()]:
        counts["all in PTX" if operator.startswith("ptx") else "all in source", kind] += count * (
            operator != "none"
        )
    table = Table("operator", *(kinds := (*KINDS, "not tried yet")), title="seeded faults")
    for operator in sorted({operator for operator, _ in counts}):
        table.add_row(operator, *(str(counts[operator, kind] or "") for kind in kinds))
    console.print(table)
    versions = ", ".join(sorted({each.triton for each in done.values()}))
    stale = sum(task.name in kept for task in chosen) - len(done)
    console.print(
        f"{len(done)} of {len(chosen)} tasks tried, with Triton {versions}; {stale} are stale: kernels changed"
    )
    wrong = [verdict for verdict in verdicts if not verdict.right]
    for v in wrong:
        line = f"{v.result}: {v.fault} {v.where} {v.said}" + f"   although {v.reason}" * bool(v.reason)
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
