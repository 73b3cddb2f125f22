"""fusedtp bench tune: find the fastest configuration of every kernel and shape class, and write the table of this GPU.

For each class: the default and its neighbours that fit the GPU are compiled; what does not compile or spills is out;
the rest is sampled in interleaved rounds, halved again and again (tune_run.py); then what is left is varied field by
field. A winner less than 1 % better than the default is the default. The table is written after each class, and a run
that was broken off goes on from there. See fusedtp/ops/launch/tuned.py for how it is read. Not measured on a GPU yet.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusedtp.ops import measured
from fusedtp.ops.launch import tuned
from fusedtp.ops.launch.config import Machine, machine_of

from . import options, tables
from . import rank as ranks
from .cli import before_cuda
from .options import Shared, known, parse
from .output import progress, table
from .rank import Rank
from .shapes import MODELS, layers
from .tune_run import Winner, tune
from .tune_space import PART_OF_CLASS, Job, Values, reduction_kernel

DEFAULTS = {  # shapes, tokens, tp, dtype
    "cuda": ("llama3-8b,llama3-70b", "512,2048,8192,16384", "1,8", "bfloat16"),
    "cpu": ("tiny", "32", "1,2", "float32"),
}
CANDIDATES = {"cuda": 48, "cpu": 2}


GATHERS = (
    "all_gather_matmul",
    "all_gather_wgrad",
    "all_gather",
)  # the transport last, with the best of the first


@dataclass(frozen=True)
class TuneOptions(Shared):
    """Find the fastest configuration of each kernel and shape class on this GPU, and write a table of them.

    Lists are separated by commas. Defaults: llama3-8b,llama3-70b at 512,2048,8192,16384 tokens on 1,8 ranks (1: the
    plain matmul) in bfloat16; on a CPU tiny at 32 on 1,2 ranks in float32, where kernels are interpreted: that shows
    that the tuner runs, no more. Each world has entries of its own. --save writes to fusedtp/ops/tables, from where
    tables ship with the package.
    """

    kernels: str = ""
    """Only these kernels."""
    candidates: int | None = None
    """Configurations to try for a class, beside the default. Default: 48; on a CPU 2."""
    out: Path | None = None
    """Folder of the table. Default: bench/out/tables."""
    resume: bool = True
    """Keep the classes that the table there holds already."""


@dataclass(frozen=True)
class Plan:
    """Options with every default filled in."""

    ranks: options.Plan
    jobs: tuple[Job, ...]
    candidates: int
    folder: Path
    resume: bool
    about: dict[str, Any]


def plan_of(given: TuneOptions, argv: Sequence[str]) -> Plan:
    """Fill in and check. Raises ValueError that lists every fault."""
    faults: list[str] = []
    at, folder = tables.plan_of(given, DEFAULTS, tuned.DTYPES, given.out, faults)
    wanted = known("kernels", given.kernels, tuned.KERNELS, faults) or tuple(tuned.KERNELS)
    if given.candidates is not None and given.candidates < 0:
        faults.append(f"--candidates {given.candidates} must not be negative")
    if faults:
        raise ValueError("; ".join(faults))
    jobs = [
        job
        for dtype in at.dtypes
        for name in at.shapes
        for w in at.tp
        for rows in at.tokens
        for job in jobs_of(name, dtype, w, rows)
        if job.kernel in wanted
    ]
    limit = CANDIDATES[at.device] if given.candidates is None else given.candidates
    about = tables.about(at.device, "fusedtp bench tune", argv)
    at = replace(at, interpret=at.device == "cpu")
    return Plan(at, tuple(dict.fromkeys(jobs)), limit, folder, given.resume, about)


def jobs_of(model: str, dtype: str, ranks: int, rows: int) -> list[Job]:
    """What a block of this model launches for so many tokens; of one rank the plain matmuls."""
    kernels = {
        "column": GATHERS,
        "row": ("matmul_reduce_scatter", reduction_kernel(rows, MODELS[model].hidden, dtype)),
    }
    found = []
    for kind, names in kernels.items():
        for kernel in names if ranks > 1 else ("matmul",):
            for layer in layers(model, ranks):
                if layer.kind == kind:
                    found.append(Job(kernel, dtype, ranks, rows, layer.n, layer.k))
    return found


Key = tuple[str, str, tuple[int, ...]]  # kernel, dtype, class


def classes(jobs: Sequence[Job], machine: Machine) -> dict[Key, list[Job]]:
    """Jobs by the entry of a table that they make together."""
    found: dict[Key, list[Job]] = {}
    for job in jobs:
        key = job.kernel, job.dtype, tuned.shape_class(job.kernel, machine, **job.extents)
        found.setdefault(key, []).append(job)
    return found


def entry_of(key: Key, jobs: Sequence[Job], winner: Winner) -> dict[str, Any]:
    """As the table holds it."""
    kernel, dtype, at = key
    return {
        "kernel": kernel,
        "dtype": dtype,
        "class": dict(zip(tuned.KERNELS[kernel].axes, at, strict=True)),
        "config": winner.values,
        "seconds": winner.seconds,
        "default_seconds": winner.default_seconds,
        "shapes": [[job.rows, job.n, job.k] for job in jobs],
    }


def kept(path: Path, machine: Machine) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All tables of a machine's file, and the entries of this Triton's. Raises ValueError for a file that is bad."""
    return tables.kept(path, machine.name, tuned.table_name(), lambda entry: tuned.faults(entry, machine))


def run(rank: Rank, plan: Plan) -> Path:
    """Tune the jobs of this rank's world. Collective; the first rank writes."""
    machine = machine_of(rank.device, 1 if rank.comm is None else rank.comm.world.ranks_per_device)
    path = plan.folder / measured.file_of(machine.name)
    others, earlier = kept(path, machine)
    entries = {tuned.key_of(entry): entry for entry in earlier}
    winners: dict[Key, Values] = {key: entry["config"] for key, entry in entries.items()}
    jobs = classes([job for job in plan.jobs if job.ranks == rank.world_size], machine)
    missing = {key: of for key, of in jobs.items() if not (plan.resume and key in entries)}
    rank.meet()  # all have read the file before the first one writes it
    with progress(len(missing), shown=rank.rank == 0) as begin:
        for key, of in missing.items():
            begin(f"{rank.world_size} ranks: {of[0].label}")
            some = of[:PART_OF_CLASS]
            winner = tune(rank, some, plan.candidates, held_beside(some[0], machine, winners))
            entries[key], winners[key] = entry_of(key, some, winner), winner.values
            if rank.rank == 0:
                name, made = tuned.table_name(), list(entries.values())
                tables.write(path, machine.name, name, plan.about, made, others)
    return path


def held_beside(job: Job, machine: Machine, winners: dict[Key, Values]) -> dict[str, Values]:
    """What the matmul of a gather is launched with while its transport is tuned."""
    if job.kernel != "all_gather":
        return {}
    other = replace(job, kernel="all_gather_matmul")
    key = other.kernel, other.dtype, tuned.shape_class(other.kernel, machine, **other.extents)
    return {other.kernel: winners[key]} if key in winners else {}


def show(path: Path) -> None:
    """Print a table that was written."""
    lines = []
    for entry in measured.parse(path.read_bytes(), path.stem)[tuned.table_name()]["entries"]:
        config = " ".join(f"{name} {value}" for name, value in entry["config"].items())
        mine, default = entry["seconds"], entry["default_seconds"]
        at = tuned.described(*tuned.key_of(entry))
        lines.append([at, config, f"{1e6 * mine:.1f}", f"{1e6 * default:.1f}", f"{default / mine - 1:.1%}"])
    header = ["kernel, dtype, class", "configuration", "us", "default us", "gain"]
    table(path.name, header, lines, wide=header[:2])


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 2 for bad input."""
    given = parse(TuneOptions, argv, "fusedtp bench tune")
    try:
        plan, path = plan_of(given, argv), None
        if plan.ranks.device != "cpu":
            before_cuda()
        for count in sorted({job.ranks for job in plan.jobs}):
            path = ranks.run(plan.ranks, count, run, plan)
    except ValueError as error:
        print(f"fusedtp bench tune: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    if path is None:
        print("fusedtp bench tune: error: no kernel of these runs on so many ranks", file=sys.stderr)
        return 2
    show(path)
    print(f"{path}; to use it: FUSEDTP_TABLES={path.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
