"""fusedtp bench crossover: finds from how many tokens on each engine wins; writes the table that engine="auto" reads.

For every operation, dtype, world size and width, each engine is measured over tokens, interleaved in one run.
fusedtp.ops.measured.fit finds the thresholds: an engine takes over from the smallest T at which it wins by more than
2 %, if it also does at every larger T. On a CPU, this compares chunked with gloo's collectives, with one thread per
rank; on GPUs also triton, which has not been measured on a GPU yet.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fusedtp.ops import measured
from fusedtp.ops.operation import OPERATIONS

from . import machine, options, tables
from . import rank as ranks
from .cases import Case, linear
from .cli import before_cuda
from .options import Shared, known, parse
from .output import progress, table
from .rank import Rank
from .sample import Rotating, Way
from .shapes import layers

DEFAULTS = {  # shapes, tokens, tp, dtype
    "cuda": ("llama3-8b,llama3-70b", "64,128,256,512,1024,2048,4096,8192,16384", "8", "bfloat16"),
    "cpu": ("qwen3-0.6b", "16,64,256,1024", "2", "float32"),
}
MINUTES = {"cuda": 5.0, "cpu": 2.0}
WARM_SECONDS = {"cuda": 0.5, "cpu": 0.0}
COPY = "triton copy"  # the fused gather with rows sent by the copy engine; in "triton", programs send them


@dataclass(frozen=True)
class CrossoverOptions(Shared):
    """Measure each engine over tokens, and write the number of rows from which on each one is used.

    Lists are comma-separated. Defaults: llama3-8b,llama3-70b at powers of two from 64 to 16384 tokens on 8 ranks in
    bfloat16; on a CPU, qwen3-0.6b at 16,64,256,1024 tokens on 2 ranks in float32. float64 is also allowed. Each world
    has separate entries. --save writes to fusedtp/ops/tables, which ships with the package.
    """

    operations: str = ""
    """Only these operations."""
    minutes: float | None = None
    """Approximate total time of all samples. Default: 5; on a CPU 2."""
    out: Path | None = None
    """Folder of the table and the picture. Default: bench/out/tables."""


def engines_of(case: Case, device: str) -> tuple[str, ...]:
    """The engines to measure; for a fused gather, both transports."""
    fused = device == "cuda" and case.dtype != "float64"
    by_copy = (COPY,) if case.example.moves == "gather" else ()
    return (*measured.ENGINES, *by_copy) if fused else measured.ENGINES[:2]


@dataclass(frozen=True)
class Plan:
    """Options with every default filled in; ranks.seconds is the time for one case and number of tokens."""

    ranks: options.Plan
    cases: tuple[Case, ...]
    folder: Path
    pictures: Path


def plan_of(given: CrossoverOptions) -> Plan:
    """Fill in defaults and check. Raises ValueError that lists every fault."""
    faults: list[str] = []
    at, folder = tables.plan_of(given, DEFAULTS, measured.DTYPES, given.out, faults)
    wanted = known("operations", given.operations, measured.FUSED, faults)
    if 1 in at.tp:
        faults.append("--tp 1: a single rank needs no engine; give at least 2")
    minutes = MINUTES[at.device] if given.minutes is None else given.minutes
    if not 0 <= minutes < math.inf:
        faults.append(f"--minutes {minutes} must be finite and not negative")
    if faults:
        raise ValueError("; ".join(faults))
    cases = dict.fromkeys(
        case
        for dtype in at.dtypes
        for w in at.tp
        for name in at.shapes
        for case in cases_of(name, dtype, w)
        if case.operation in (wanted or measured.FUSED)
    )
    each = 60 * minutes / (len(cases) * len(at.tokens))
    pictures = machine.HERE / "results" if given.save else folder  # only tables ship with the package
    at = replace(at, tokens=tuple(sorted(set(at.tokens))), seconds=each)
    return Plan(at, tuple(cases), folder, pictures)


def cases_of(model: str, dtype: str, ranks: int, tokens: int = 0) -> list[Case]:
    """Cases on the largest layers of the model: gate and up after a gather, down before a sum."""
    largest = {layer.kind: layer for layer in layers(model, ranks)}  # the last one of each kind
    return [
        linear(operation, dtype, tokens, largest[example.layer], ranks)
        for operation in measured.FUSED
        if (example := OPERATIONS[operation].example) is not None
    ]


def ways(rank: Rank, case: Case, engines: Sequence[str]) -> dict[str, Way]:
    """Engine (or COPY) -> one call on the next set of operands, the same sets for all."""
    sets = rank.copies(case.draw(rank))

    def way(name: str) -> Way:
        one = Rotating(case.call(rank, "triton" if name == COPY else name), sets)

        def run() -> object:  # after a barrier, so every rank is in this call or has returned from it
            measured.hold(measured.TRANSPORTS[name == COPY])
            return one()

        return run

    return {engine: way(engine) for engine in engines}


Times = dict[int, dict[str, float]]  # tokens -> engine -> median seconds


@torch.no_grad()
def run(rank: Rank, plan: Plan) -> list[tuple[Case, Times]]:
    """Measure every case of this rank's world over tokens. Collective."""
    cases = [case for case in plan.cases if case.tp == rank.world_size]
    found = []
    with progress(len(cases) * len(plan.ranks.tokens), shown=rank.rank == 0) as begin:
        for case in cases:
            times: Times = {}
            for tokens in plan.ranks.tokens:
                begin(f"{case.operation} {case.label}, T = {tokens}")
                at = replace(case, tokens=tokens)
                candidates = ways(rank, at, engines_of(case, plan.ranks.device))
                rank.warm(candidates["collective"], WARM_SECONDS[rank.device.type])
                times[tokens] = rank.rounds(candidates, plan.ranks.seconds)
            found.append((case, times))
    measured.hold(None)
    return found


def thresholds(times: Times) -> dict[str, Any]:
    """The part of an entry derived from the medians: first the transports, then the engines with the better one."""
    steps: dict[str, measured.Steps] = {}
    if all(COPY in known for known in times.values()):
        by = {rows: {"programs": known["triton"], "copy": known[COPY]} for rows, known in times.items()}
        steps["transports"] = measured.fit(by, measured.TRANSPORTS)
        taken = {rows: by[rows][measured.at(steps["transports"], rows)[1]] for rows in times}
        best = {rows: known | {"triton": taken[rows]} for rows, known in times.items()}
    else:
        best = times
    names = [name for name in measured.ENGINES if any(name in known for known in times.values())]
    steps["engines"] = measured.fit(best, names)
    listed = {name: [list(step) for step in found] for name, found in steps.items()}
    return listed | {"seconds": [[rows, times[rows]] for rows in sorted(times)]}


def entries_of(found: Sequence[tuple[Case, Times]], plan: Plan) -> list[dict[str, Any]]:
    """The table entries: thresholds, and the medians from which they were derived."""
    entries = {}
    for case, times in found:
        key = measured.Key(case.operation, case.dtype, case.tp, plan.ranks.world)
        entries[key, case.width] = key._asdict() | {"width": case.width, **thresholds(times)}
    return list(entries.values())


def kept(path: Path, machine: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All tables of a machine's file, and the entries of engines. Raises ValueError for a bad file."""
    return tables.kept(path, machine, "engines", lambda entry: measured.faults(entry, machine))


def place(entry: dict[str, Any]) -> tuple[Any, ...]:
    """The key of an entry."""
    return *(entry[name] for name in measured.Key._fields), entry["width"]


# -- for people: a table and a picture --------------------------------------------------------------------------------


COLORS = {"collective": "tab:gray", "chunked": "tab:blue", "triton": "tab:orange", "triton copy": "tab:red"}


def show(entries: Sequence[dict[str, Any]], title: str) -> None:
    """Print the entries."""
    lines = []
    for entry in entries:
        steps = ", ".join(f"{rows} {engine}" for rows, engine in entry["engines"])
        times = "; ".join(
            f"{rows}: " + ", ".join(f"{engine} {1e3 * s:.3g}" for engine, s in times_of.items())
            for rows, times_of in entry["seconds"]
        )
        where = f"{entry['world']} {entry['ranks']}"
        lines.append([entry["operation"], entry["dtype"], where, str(entry["width"]), steps, times])
    header = ["operation", "dtype", "ranks", "width", "from rows on", "ms of each engine"]
    table(title, header, lines, wide=header[4:])


def draw(path: Path, entries: Sequence[dict[str, Any]], title: str) -> None:
    """One panel per entry: time relative to collective over tokens, and where the engine changes."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    height = -(-len(entries) // 2)
    figure, axes = plt.subplots(height, 2, figsize=(10, 2.6 * height), squeeze=False, layout="constrained")
    for axis, entry in zip(axes.flat, entries):
        rows = [at for at, _ in entry["seconds"]]
        for engine in dict.fromkeys(name for _, times_of in entry["seconds"] for name in times_of):
            share = [times_of[engine] / times_of["collective"] for _, times_of in entry["seconds"]]
            axis.plot(rows, share, marker=".", label=engine, color=COLORS[engine])
        ends = [begin for begin, _ in entry["engines"][1:]] + [rows[-1]]
        for (begin, engine), end in zip(entry["engines"], ends, strict=True):
            axis.axvspan(max(begin, rows[0]), end, color=COLORS[engine], alpha=0.08)
        axis.set(xscale="log", xlabel="tokens", ylabel="time / collective")
        axis.set_title(
            f"{entry['operation']} {entry['dtype']}, width {entry['width']}, {entry['world']} ranks",
            fontsize=8,
        )
        axis.legend(fontsize=7)
    for axis in axes.flat[len(entries) :]:
        axis.axis("off")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 2 for bad input."""
    given = parse(CrossoverOptions, argv, "fusedtp bench crossover")
    try:
        plan = plan_of(given)
        at = plan.ranks
        if at.device == "cuda":
            before_cuda()
        about = tables.about(at.device, "fusedtp bench crossover", argv)
        machine = measured.kind_of(torch.device("cuda", 0) if at.device == "cuda" else torch.device("cpu"))
        path = plan.folder / measured.file_of(machine)
        kept(path, machine)  # report a bad file before measuring
        found = []
        for count in sorted({case.tp for case in plan.cases}):
            found += ranks.run(at, count, run, plan)
        entries = entries_of(found, plan)
        others, earlier = kept(path, machine)
        now = {place(entry) for entry in entries}
        whole = [*(entry for entry in earlier if place(entry) not in now), *entries]
        tables.write(path, machine, "engines", about, whole, others)
    except ValueError as error:
        print(f"fusedtp bench crossover: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    show(entries, machine)
    picture = plan.pictures / f"{machine}.crossover.png"
    draw(picture, entries, f"{about['device']}, torch {about['torch']}, {at.world}")
    print(f"{path}, {picture}; to use it: FUSEDTP_TABLES={path.parent}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
