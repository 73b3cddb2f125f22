"""python -m fusedtp.bench.predicted FILE ...: tables of engines from predicted times, for GPUs without measured ones.

FILE is what `python -m fusedtp.bench.timed --sizes --save FILE` writes. The table `predicted` of each kind of GPU that
the node stands for goes to fusedtp/ops/tables, from where it ships; `engine="auto"` asks it where no table of measured
times is. A fused kernel is taken only where it is predicted to be MARGIN times as fast as product and collective one
after the other: the model is up to a quarter too fast (docs/timed-schedule.md).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fusedtp.ops import measured

from . import tables
from .shapes import MODELS

MARGIN = 1.25
GPUS = {  # what torch calls the GPUs of each node
    "h100": ("NVIDIA H100 80GB HBM3",),
    "h200": ("NVIDIA H200",),
    "a100": ("NVIDIA A100-SXM4-80GB",),
}
LIKE = {"all_gather_matmul": ("all_gather_matmul", "all_gather_gated_matmul")}  # what travels is the same
DTYPES, RANKS = ("bfloat16", "float16"), 8  # of the predictions; fp16 is as fast


def steps_of(fused: Mapping[int, bool]) -> measured.Steps:
    """Whether the fused kernel wins at these numbers of rows, to [(first rows, engine)], rows rising from 0.

    Between two of these numbers it is taken if it wins at both. Few rows have kernels of their own, so it may win, lose
    and win again; predictions have no noise, so each change is real.
    """
    steps: measured.Steps = []
    for at, before in zip(sorted(fused), (0, *sorted(fused))):
        taken = bool(steps) and steps[-1][1] == "triton"
        if fused[at] and not taken:
            steps.append((at if steps else 0, "triton"))
        elif not fused[at] and (taken or not steps):
            steps.append((before + 1 if steps else 0, "collective"))
    return steps


def entries_of(rows: Mapping[str, Mapping[str, float]]) -> list[tables.Entry]:
    """`rows` by "operation model tokens": microseconds, `unfused` and `fused`."""
    times: dict[tuple[str, int], dict[int, dict[str, float]]] = {}
    for name, us in rows.items():
        operation, model, tokens = name.split()
        seconds = {"collective": us["unfused"] * 1e-6, "triton": us["fused"] * 1e-6}
        times.setdefault((operation, MODELS[model].hidden), {})[int(tokens)] = seconds
    found = []
    for (operation, width), known in times.items():
        steps = steps_of({at: each["triton"] * MARGIN < each["collective"] for at, each in known.items()})
        for dtype in DTYPES:
            for name in LIKE.get(operation, (operation,)):
                key = measured.Key(name, dtype, RANKS, "processes")._asdict()
                made = [[at, known[at]] for at in sorted(known)]
                found.append(key | {"width": width, "engines": [list(step) for step in steps], "seconds": made})
    return found


def write(file: Path, folder: Path) -> list[Path]:
    """The tables that follow from one file, written. Raises ValueError for a file that is none."""
    try:
        body: dict[str, Any] = json.loads(file.read_text())
        entries, names = entries_of(body["rows"]), GPUS[body["node"]]
        about = {name: body[name] for name in ("node", "unit", "commit", "command")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no file of predicted times: {error!r}") from None
    written = []
    for name in names:
        machine = measured.slug(name)
        path = folder / measured.file_of(machine)
        others, _ = tables.kept(path, machine, "predicted", partial(measured.faults, machine=machine))
        tables.write(path, machine, "predicted", about, entries, others)
        written.append(path)
    return written


def main(argv: Sequence[str] | None = None, folder: Path = measured.SHIPPED) -> int:
    """Write and say where; 2 for a file that is none."""
    files = list(sys.argv[1:] if argv is None else argv)
    if not files or files[0].startswith("-"):
        print(__doc__, file=sys.stderr if not files else sys.stdout)
        return 0 if files and files[0] in ("-h", "--help") else 2
    try:
        for file in files:
            for path in write(Path(file), folder):
                print(path)
    except ValueError as error:
        print(f"fusedtp.bench.predicted: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
