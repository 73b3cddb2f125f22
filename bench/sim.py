"""fusedtp bench sim, or python -m bench.sim: what a schedule of the simulator costs.

    compile        of every kernel of a case, from an empty cache, with the first schedule
    lockstep       a schedule with the warps of a program in step, as the machine runs two of three
    weak           the same with all late effects
    warp by warp   weak, one warp at a time
    schedules/s    of `fusedtp check`, which mixes them, after compiling

For every fused kernel on simulated ranks, by one process. The median of several schedules each, interleaved.
"""

from __future__ import annotations

import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import tyro
from rich.console import Console
from rich.table import Table

from fusedtp.checks.cases import compiled_cases
from fusedtp.sim import Case, Schedule, explore, run_schedule
from fusedtp.sim.explore import TARGET, compiler_for, schedules

from . import machine

WAYS = {"lockstep": dict(weak=False), "weak": dict(weak=True), "warp by warp": dict(weak=True, fine=True)}


@dataclass(frozen=True)
class Options:
    """Cost of simulation, on one core."""

    rounds: int = 3
    """Schedules of each way."""
    schedules: int = 12
    """Schedules as `fusedtp check` mixes them."""
    world_size: int = 4
    """Simulated ranks."""
    target: str = TARGET
    """Whose compiled code runs."""
    kernels: tuple[str, ...] = ()
    """Cases by name. Default: all of the library's own."""
    save: bool = False
    """Keep the result in the repository."""


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """While entered, kernels are compiled anew."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        compiler_for.cache_clear()
        yield


def costs(case: Case, options: Options) -> dict[str, float]:
    """Seconds of the first schedule (which compiles) and of each way; schedules a second."""

    def seconds(seed: int, **way: Any) -> float:
        run = case.make()
        begin = time.perf_counter()
        run_schedule(run, Schedule("random", seed, target=options.target, **way))
        return time.perf_counter() - begin

    with nothing_compiled():
        first = seconds(0)
        times = [{way: seconds(seed, **how) for way, how in WAYS.items()} for seed in range(options.rounds)]
        outcome = explore(case, schedules(options.schedules, target=options.target))
    outcome.raise_fault()
    medians = {way: statistics.median(each[way] for each in times) for way in WAYS}
    return {
        "compile": max(first - medians["lockstep"], 0.0), **medians,
        "schedules_per_second": outcome.schedules / outcome.seconds,
    }  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    options = tyro.cli(Options, args=list(argv), prog="fusedtp bench sim", description=Options.__doc__)
    torch.set_num_threads(1)
    console = Console()
    command = shlex.join(["fusedtp", "bench", "sim", *argv])
    about = machine.describe(1, list(argv)) | {"command": command}
    cases = {case.name: case for case in compiled_cases(options.world_size, options.target)}
    table = Table("kernel", "compile", *WAYS, "schedules/s")
    rows: dict[str, dict[str, float]] = {}
    for name in options.kernels or cases:
        if name not in cases:
            raise SystemExit(f"no case is called {name!r}: it must be one of {', '.join(cases)}")
        rows[name] = found = costs(cases[name], options)
        times = [f"{found[way]:.2f} s" for way in ("compile", *WAYS)]
        table.add_row(name, *times, f"{found['schedules_per_second']:.2f}")
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), style="dim")
    console.print(table)
    folder = machine.folder_of(about, options.save)
    folder.mkdir(parents=True, exist_ok=True)
    given = {"world_size": options.world_size, "target": options.target}
    (folder / "sim.json").write_text(
        json.dumps({"machine": about, **given, "kernels": rows}, indent=1) + "\n"
    )
    console.print(f"{folder / 'sim.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
