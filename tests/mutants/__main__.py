"""python -m tests.mutants: seed faults into the kernels one at a time, print which check finds each. Takes long.

Exit code 0 if every mutant is found, 1 if one survives, 2 for bad input.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fusedtp.checks.workers import cores
from fusedtp.sim.report import WIDTH

from . import runner

SURVIVORS, BAD_INPUT, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True)
class Options:
    """Seed faults into the library's kernels, one at a time, and print which check finds each."""

    workers: int | None = None
    """Processes. Default: one a core."""
    oldest_python: Path | None = None
    """An interpreter with the oldest Triton, under which the memory order of mutants is judged."""
    keep: Path | None = None
    """A file that takes each verdict as it comes; a run that was broken off goes on from there."""

    def faults(self) -> list[str]:
        """What is wrong with the options themselves."""
        found = []
        if self.workers is not None and self.workers < 1:
            found.append(f"--workers {self.workers} is too small")
        if self.keep is not None and not self.keep.absolute().parent.is_dir():
            found.append(f"--keep {self.keep}: no such folder")
        if self.oldest_python is not None and not self.oldest_python.is_file():
            found.append(f"--oldest-python {self.oldest_python}: no such file")
        return found


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = tyro.cli(Options, prog="python -m tests.mutants", args=argv)
    wrong = options.faults()
    for line in wrong:
        print(f"python -m tests.mutants: error: {line}", file=sys.stderr)
    if wrong:
        return BAD_INPUT
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} verdicts"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task("mutants", total=None)
            matrix = runner.run(
                workers=options.workers or cores(),
                oldest_python=None if options.oldest_python is None else str(options.oldest_python),
                keep=options.keep,
                progress=lambda _, done, of: progress.update(task, completed=done, total=of),
            )
    except KeyboardInterrupt:
        return INTERRUPTED
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(matrix.table())
    for line in matrix.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0 if matrix.clean else SURVIVORS


if __name__ == "__main__":
    sys.exit(main())
