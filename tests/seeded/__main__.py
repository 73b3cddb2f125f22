"""python -m tests.seeded: put faults into the kernels one at a time, print which are found. Takes two hours.

A run continues from the stored verdicts. Exit code 0 if every fault tried so far is found or correctly listed as
equivalent, 1 if not, 2 for bad input.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from fusedtp.checks.workers import cores

from .trying import Task, run, tasks
from .verdicts import KEPT, KINDS, Kept, load, save


@dataclass(frozen=True)
class Options:
    """Put faults into the library's kernels, one at a time, and print which are found."""

    only: str = ""
    """Only tasks with this in their name, such as "drop", "weaken order" or "ptx | meet_kernel"."""
    report: bool = False
    """Print the known verdicts and run nothing."""
    minutes: float | None = None
    """Stop after this many minutes. The next run continues."""
    workers: int = cores()
    """Number of processes. Default: one per core."""
    keep: Path = KEPT
    """The file of verdicts: read at the start, extended with each new verdict."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = tyro.cli(Options, prog="python -m tests.seeded", args=argv)
    chosen, kept = tasks(options.only), load(options.keep)
    if not chosen:
        print(f"python -m tests.seeded: error: no task is named {options.only}", file=sys.stderr)
        return 2
    done = {task.name: kept[task.name] for task in chosen if task.name in kept and kept[task.name].key == task.key}
    left = [] if options.report else [task for task in chosen if task.name not in done]
    for n, made in enumerate(run(left, options.workers, options.minutes and 60 * options.minutes), start=1):
        kept[made.task] = done[made.task] = made
        save(options.keep, kept)
        kinds = Counter(verdict.kind for verdict in made.verdicts)
        print(f"{n} of {len(left)}: {made.task}: " + ", ".join(f"{kinds[kind]} {kind}" for kind in kinds))
    return report(chosen, done, stale=sum(task.name in kept for task in chosen) - len(done))


def report(chosen: Sequence[Task], done: dict[str, Kept], stale: int) -> int:
    """Print the known verdicts of these tasks and return the exit code."""
    verdicts = [verdict for task in chosen if task.name in done for verdict in done[task.name].verdicts]
    named = [(v.fault, v.kind) for v in verdicts]
    named += [(task.name, "not tried yet") for task in chosen if task.name not in done]
    counts = Counter((name.split(" | ")[0], kind) for name, kind in named)
    for (operator, kind), count in [*counts.items()]:
        if operator != "none":
            counts["all in PTX" if operator.startswith("ptx") else "all in source", kind] += count
    print(f"{'':30}" + "".join(f"{kind:>15}" for kind in KINDS))
    for operator in sorted({operator for operator, _ in counts}):
        print(f"{operator:30}" + "".join(f"{counts[operator, kind] or '':>15}" for kind in KINDS))
    versions = ", ".join(sorted({each.triton for each in done.values()}))
    print(f"{len(done)} of {len(chosen)} tasks tried, with Triton {versions}; {stale} stale, of changed kernels")
    wrong = [verdict for verdict in verdicts if not verdict.right]
    for v in wrong:
        print(f"{v.result}: {v.fault} {v.where} {v.said}" + f", although {v.reason}" * bool(v.reason))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
