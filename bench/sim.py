"""fusedtp bench sim, or python -m bench.sim: the cost of a schedule of the simulator.

    compile        compiling every kernel of a case from an empty cache, at the first schedule
    lockstep       a schedule with the warps of a program in lockstep, like two of three schedules of `fusedtp check`
    weak           the same with all late effects
    warp by warp   weak, one warp at a time
    schedules/s    of `fusedtp check`, which mixes them, after compiling

Measured for every fused kernel on simulated ranks, in CPU seconds of one process: the median of several schedules
each, interleaved. A case makes three calls of its kernel. A second table has single calls, with the memory of the
call's tensors and of the whole process.
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
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import tyro
from rich.console import Console
from rich.table import Table

from fusedtp.checks.cases import compiled_cases, fused_case
from fusedtp.checks.dense import Call, gpu
from fusedtp.sim import Case, Schedule, explore, run_schedule
from fusedtp.sim.case import memory_map
from fusedtp.sim.explore import TARGET, compiler_for, schedules

from . import machine

ONE_CALL: dict[str, tuple[int, str, int, int, dict[str, Any]]] = {  # ranks, operation, rows per rank, columns, more
    "a gather, two tiles of 64x64 a program": (4, "all_gather_matmul", 32, 64, dict(
        k=72, dtype=torch.float16, tma=True, tile=64, block_k=32, programs=(1, 1))),
    "a two-shot all-reduce of 512 elements": (8, "two_shot_all_reduce", 8, 8, {}),
    "a two-shot all-reduce of 262,144 elements": (8, "two_shot_all_reduce", 64, 512, dict(tile=64, block_k=32)),
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "lockstep": dict(weak=False),
    "weak": dict(weak=True),
    "warp by warp": dict(weak=True, fine=True),
}


@dataclass(frozen=True)
class Options:
    """Cost of simulation, on one core."""

    rounds: int = 3
    """Schedules of each kind."""
    schedules: int = 12
    """Schedules mixed as by `fusedtp check`."""
    world_size: int = 4
    """Simulated ranks."""
    target: str = TARGET
    """Target of the compiled code."""
    kernels: tuple[str, ...] = ()
    """Cases by name. Default: all of the library's own."""
    save: bool = False
    """Keep the result in the repository."""


@contextmanager
def nothing_compiled() -> Iterator[None]:
    """In this context, kernels are compiled again."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, TRITON_CACHE_DIR=folder):
        compiler_for.cache_clear()
        yield


def costs(case: Case, options: Options) -> dict[str, float]:
    """Seconds of compiling and of each kind of schedule; mixed schedules per second."""

    def seconds(seed: int, **way: Any) -> float:
        run = case.make()
        begin = time.process_time()
        run_schedule(run, Schedule("random", seed, target=options.target, **way))
        return time.process_time() - begin

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


def one_call(name: str, target: str) -> tuple[Case, float]:
    """A case of a single call, and the MB of its tensors."""
    ranks, operation, rows, columns, more = ONE_CALL[name]
    case = fused_case(name, [Call(operation, (rows,) * ranks, (columns,), **more)], machine=gpu(target))
    return case, sum(each.nbytes for each in memory_map(case.make()).allocations) / 1e6


def alone(name: str, options: Options) -> dict[str, float]:
    """Schedules per second of one call, of each kind and mixed as by `fusedtp check`; MB of tensors and process."""
    torch.set_num_threads(1)
    case, tensors = one_call(name, options.target)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(options.rounds + 1):
        for way, how in WAYS.items():
            run, begin = case.make(), time.process_time()
            run_schedule(run, Schedule("random", seed, target=options.target, **how))
            seconds[way].append(time.process_time() - begin)
    rates = {f"{way}, schedules/s": 1 / statistics.median(taken[1:]) for way, taken in seconds.items()}
    begin = time.process_time()
    outcome = explore(case, schedules(options.schedules, target=options.target))
    outcome.raise_fault()
    rates["mixed, schedules/s"] = outcome.schedules / (time.process_time() - begin)
    # not from getrusage: a child inherits its parent's value
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    return rates | {"tensors, MB": tensors, "process, MB": peak}


def in_a_process(name: str, options: Options) -> dict[str, float]:
    """`alone` in a separate process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(alone, name, options).result()


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
    calls = {} if options.kernels else {name: in_a_process(name, options) for name in ONE_CALL}
    if calls:
        single = Table("one call", "ranks", *next(iter(calls.values())))
        for name, found in calls.items():
            single.add_row(name, str(ONE_CALL[name][0]), *(f"{value:,.1f}" for value in found.values()))
        console.print(single)
    folder = machine.folder_of(about, options.save)
    folder.mkdir(parents=True, exist_ok=True)
    given = {"world_size": options.world_size, "target": options.target}
    (folder / "sim.json").write_text(
        json.dumps({"machine": about, **given, "kernels": rows, "one call": calls}, indent=1) + "\n"
    )
    console.print(f"{folder / 'sim.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
