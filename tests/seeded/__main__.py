"""python -m tests.seeded: put faults into the kernels one at a time, print which are found. Takes long.

Exit code 0 if every fault is found or rightly called equivalent, 1 if not, 2 for bad input.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fusedtp.checks.workers import cores

from .source import kernels
from .trying import holes, run, tasks


@dataclass(frozen=True)
class Options:
    """Put faults into the library's kernels, one at a time, and print which are found."""

    only: str = ""
    """Operators whose name has this in it, such as "drop", "weaken order" or "ptx"."""
    workers: int | None = None
    """Processes. Default: one a core."""
    keep: Path | None = None
    """A file that takes each verdict as it comes; a run that was broken off goes on from there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = tyro.cli(Options, prog="python -m tests.seeded", args=argv)
    chosen, workers, keep = tasks(options.only), options.workers or cores(), options.keep
    wrong = [] if chosen else [f"--only {options.only}: no operator has that in its name"]
    wrong += [f"--workers {workers} is too small"] if workers < 1 else []
    wrong += [f"--keep {keep}: no such folder"] if keep and not keep.absolute().parent.is_dir() else []
    for line in wrong:
        print(f"python -m tests.seeded: error: {line}", file=sys.stderr)
    if wrong:
        return 2
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("seeded faults", total=len(chosen))
        verdicts = run(chosen, workers, keep, lambda n: progress.update(task, completed=n))
    counts = Counter((v.operator, "equivalent" if v.reason else v.result) for v in verdicts)
    kinds = ("found", "equivalent", "survived", "crashed")
    table = Table("operator", *kinds, title="seeded faults")
    for name in sorted({v.operator for v in verdicts}):
        table.add_row(name, *(str(counts[name, kind]) for kind in kinds))
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    wrong = [] if options.only else holes(kernels(), [v.operator for v in verdicts])
    wrong += [str(verdict) for verdict in verdicts if not verdict.right]
    for line in wrong:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
