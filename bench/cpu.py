"""fusedtp bench cpu, or python -m bench: operations and one training step on this machine's CPU, in five minutes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from rich.console import Console

from . import machine, ops, report, step, timeline
from .options import Plan
from .rank import Rank, run


@dataclass(frozen=True)
class Options:
    """Benchmarks of fusedtp on CPU ranks, one core and thread each, against gloo and torch's parallelize_module.

    Results go to bench/out/, or with --save to bench/results/<machine>/.
    """

    only: Literal["all", "ops", "step"] = "all"
    """What to measure."""
    timeline: bool = False
    """Draw one call of each operation instead: which matmuls run while which shards are awaited."""
    minutes: float = 5.0
    """About how long the measurement takes."""
    ranks: int = 2
    """World size."""
    engine: Literal["chunked", "collective", "auto"] = "chunked"
    """The engine that "ours" stands for."""
    match: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """Only the operations' rows whose name contains this."""
    save: bool = False
    """Keep the result in the repository."""


def main(argv: Sequence[str]) -> int:
    """Measure, print, write."""
    options = tyro.cli(Options, args=list(argv), prog="fusedtp bench cpu", description=Options.__doc__)
    console = Console(width=None if Console().is_terminal else 130)
    about = machine.describe(options.ranks, list(argv))
    folder = machine.folder_of(about, options.save)
    folder.mkdir(parents=True, exist_ok=True)
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), style="dim", soft_wrap=True)
    if about["cores"] < options.ranks:
        console.print(f"{options.ranks} ranks share {about['cores']} cores: these figures say little")
    plan = Plan(world="processes", device="cpu")
    if options.timeline:
        calls = run(plan, options.ranks, _timeline)
        timeline.draw(folder / "timeline.png", calls)
        for operation, ranks in calls.items():
            overlap = ", ".join(
                f"rank {r} {1e3 * timeline.overlapped(operation, ranks, r):.1f}" for r in range(len(ranks))
            )
            console.print(f"{operation}: ms of matmuls before the last shard had arrived: {overlap}")
        console.print(f"{folder / 'timeline.png'}")
        return 0
    seconds = (
        60 * options.minutes * 0.8
    )  # the rest: start, warm-up, at least three rounds of the longest rows
    share = 0.65 if options.only == "all" else 1.0
    result = None
    if options.only != "step":
        cases = [case for case in ops.all_cases() if options.match in case.label]
        result = run(plan, options.ranks, ops.measure, cases, options.engine, share * seconds)
        report.print_ops(console, result)
    steps = []
    if options.only != "ops":
        share = 0.35 if options.only == "all" else 1.0
        for dtype in ops.DTYPES:
            budget = share * seconds / len(ops.DTYPES)
            steps.append(run(plan, options.ranks, step.measure, dtype, options.engine, budget))
        report.print_steps(console, steps)
    report.save_json(folder / "bench.json", about, result, steps)
    report.save_picture(folder / "bench.png", about, result, steps)
    console.print(f"{folder / 'bench.json'}, {folder / 'bench.png'}", soft_wrap=True)
    return 0


def _timeline(rank: Rank) -> dict[str, list[timeline.Call]]:
    return timeline.record(rank.rank, 2048, 1024, 2816)
