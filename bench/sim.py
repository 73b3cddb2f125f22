"""fusedtp bench sim, or python -m bench.sim: what simulating a kernel costs beside interpreting it.

The same launches of one rank (nobody to wait for), interleaved: as Triton's interpreter runs them, and as a schedule of
the simulator, with the race detector and without. Then schedules a second of every fused kernel at W = 4.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from fusedtp.checks.cases import fused_cases
from fusedtp.sim import Case, Launch, Schedule, explore, run_schedule

from . import machine


@dataclass(frozen=True)
class Options:
    """Cost of simulation, on one core."""

    rounds: int = 9
    """Interleaved repetitions of each way."""
    schedules: int = 30
    """Schedules of each kernel at W = 4."""
    save: bool = False
    """Keep the result in the repository."""


def plainly(case: Case) -> None:
    """All launches of the one rank, in order, by Triton's interpreter alone."""
    made = case.make()
    (work,) = made.work
    for each in work:
        assert isinstance(each, Launch)
        each.kernel[each.shape](**each.args)
    assert made.check is not None and not made.check()


def simulated(case: Case, detect: bool) -> None:
    run_schedule(case.make(), Schedule("run_to_block"), detect=detect)


def overhead(case: Case, rounds: int) -> dict[str, float]:
    """Median seconds of each way."""
    ways: dict[str, Callable[[], None]] = {
        "interpreted": lambda: plainly(case),
        "simulated": lambda: simulated(case, True),
        "simulated, no race detector": lambda: simulated(case, False),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        for way, run in ways.items():
            begin = time.perf_counter()
            run()
            if turn:  # the first warms up
                times[way].append(time.perf_counter() - begin)
    return {way: statistics.median(seconds) for way, seconds in times.items()}


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    options = tyro.cli(Options, args=list(argv), prog="fusedtp bench sim", description=Options.__doc__)
    torch.set_num_threads(1)
    console = Console()
    command = shlex.join(["fusedtp", "bench", "sim", *argv])
    about = machine.describe(1, list(argv)) | {"command": command}
    table = Table(
        "kernel", "interpreted", "simulated", "overhead", "without detector", "schedules/s at W = 4"
    )
    rows: dict[str, Any] = {}
    for one, four in zip(fused_cases(1), fused_cases(4), strict=True):
        seconds = overhead(one, options.rounds)
        outcome = explore(four, options.schedules)
        outcome.raise_fault()
        plain = seconds["interpreted"]
        rate = outcome.schedules / outcome.seconds
        rows[one.name] = {"seconds": seconds, "schedules_per_second": rate, "schedules": outcome.schedules}
        table.add_row(
            one.name,
            f"{1e3 * plain:.0f} ms",
            f"{1e3 * seconds['simulated']:.0f} ms",
            f"{seconds['simulated'] / plain:.2f}x",
            f"{seconds['simulated, no race detector'] / plain:.2f}x",
            f"{rate:.2f}",
        )
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), style="dim")
    console.print(table)
    folder = machine.folder_of(about, options.save)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sim.json").write_text(json.dumps({"machine": about, "kernels": rows}, indent=1) + "\n")
    console.print(f"{folder / 'sim.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
