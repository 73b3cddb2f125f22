"""python -m tests.sim.ptx.corpus.first_found: which schedule is the first to show each mistake of the corpus.

Runs several seeds; the table counts mistakes by the worst one. Exit code 1 if one is not found within its bound.
"""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from fusedtp.checks.workers import cores
from fusedtp.sim import Case, explore
from fusedtp.sim.explore import schedules

from . import wrong


@dataclass(frozen=True)
class Options:
    """Find the first schedule that shows each mistake of the corpus."""

    seeds: int = 5
    """First seeds, 1,000 apart."""
    target: str = "sm_80"
    """The GPU that kernels are compiled for."""
    workers: int | None = None
    """Number of processes. Default: one per core."""


def first_found(number: int, seed: int, target: str) -> int:
    """The schedule that shows a mistake, from 1 on; 0 if none within its bound does."""
    each: Any = wrong.WRONG[number]
    chosen = list(schedules(each.within, first_seed=seed, target=target))
    with patch("fusedtp.sim.ptx.machine.LAST_PATIENCE", 50):  # deadlocks are told after fewer polls in vain
        outcome = explore(Case(each.name, lambda: each.make(each.bug)), chosen, shrink=False)
    return outcome.schedules if outcome.fault is not None else 0


def main() -> int:
    """Try every mistake and print how soon each is found."""
    options = tyro.cli(Options, prog="python -m tests.sim.ptx.corpus.first_found")
    seeds, console = [1000 * n for n in range(options.seeds)], Console()
    tasks = [(number, seed, options.target) for number in range(len(wrong.WRONG)) for seed in seeds]
    with ProcessPoolExecutor(options.workers or cores(), get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        done = pool.map(first_found, *zip(*tasks, strict=True))
        done = track(done, "mistakes", len(tasks), console=console)
        found = dict(zip(tasks, done, strict=True))
    worst, missed = Counter[int](), []
    for number, each in enumerate(wrong.WRONG):
        at = [found[number, seed, options.target] for seed in seeds]
        worst[max(at)] += 1
        if 0 in at:
            missed.append(f"{each.name}: not within {each.within} schedules from {at.count(0)} of the seeds")
        elif max(at) > 12:
            console.print(f"{each.name}: in {max(at)} schedules", markup=False)
    table = Table("within schedules", "mistakes", title=f"{len(wrong.WRONG)} mistakes, {options.target}")
    for most in (1, 4, 12, max(worst)):
        table.add_row(str(most), str(sum(count for at, count in worst.items() if 0 < at <= most)))
    console.print(table)
    for line in missed:
        console.print(line, markup=False)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
