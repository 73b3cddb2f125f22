"""python -m fusedtp.bench.predicted FILE ...: tables of engines from predicted times, for GPUs without measured ones.

FILE is what `python -m fusedtp.bench.timed --sizes --tp RANKS --save FILE` writes. All files of one node, one for each
number of ranks, make the table `predicted` of each kind of GPU that the node stands for. It goes to fusedtp/ops/tables,
from where it ships; `engine="auto"` asks it where no table of measured times is. A fused kernel is taken only where it
is predicted to be MARGIN times as fast as product and collective one after the other: the model is up to a quarter too
fast (docs/timed-schedule.md). A gather's rows go by the copy engine, which takes more calls of the driver, from the
first size on that gains GAIN by it, if no larger one loses.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from fusedtp.ops import measured

from . import tables
from .shapes import MODELS

MARGIN, GAIN = 1.25, 1.02
GPUS = {  # what torch calls the GPUs of each node
    "h100": ("NVIDIA H100 80GB HBM3",),
    "h200": ("NVIDIA H200",),
    "a100": ("NVIDIA A100-SXM4-80GB",),
}
LIKE = {"all_gather_matmul": ("all_gather_matmul", "all_gather_gated_matmul")}  # what travels is the same
DTYPES = ("bfloat16", "float16")  # of the predictions; fp16 is as fast


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


def transports_of(times: Mapping[int, Mapping[str, float]]) -> measured.Steps:
    """Who moves a gather's rows, by the number of rows of all ranks; `times` by it, "fused" and maybe "copied"."""
    steps: measured.Steps = [(0, "programs")]
    for at in sorted(times, reverse=True):
        copied = times[at].get("copied", inf)
        if copied > times[at]["fused"]:
            break
        if copied * GAIN <= times[at]["fused"]:
            steps[1:] = [(at, "copy")]
    return steps


def entries_of(rows: Mapping[str, Mapping[str, float]], ranks: int) -> list[tables.Entry]:
    """What the table says of groups of so many ranks, for each operation, width and dtype.

    rows   by "operation model tokens": microseconds, "unfused", "fused" and, of a gather by copies, "copied"
    """
    times: dict[tuple[str, int], dict[int, Mapping[str, float]]] = {}
    for name, us in rows.items():
        operation, model, tokens = name.split()
        times.setdefault((operation, MODELS[model].hidden), {})[int(tokens)] = us
    found = []
    for (operation, width), all_us in times.items():
        transports = transports_of(all_us)
        known = {}
        for at, us in all_us.items():
            fused = us["copied" if measured.at(transports, at)[1] == "copy" else "fused"]
            known[at] = {"collective": us["unfused"] * 1e-6, "triton": fused * 1e-6}
        steps = steps_of({at: each["triton"] * MARGIN < each["collective"] for at, each in known.items()})
        for dtype in DTYPES:
            for name in LIKE.get(operation, (operation,)):
                key = measured.Key(name, dtype, ranks, "processes")._asdict()
                made = [[at, known[at]] for at in sorted(known)]
                entry = key | {"width": width, "engines": [list(step) for step in steps]}
                if len(transports) > 1:
                    entry["transports"] = [list(step) for step in transports]
                found.append(entry | {"seconds": made})
    return found


def write(files: Sequence[Path], folder: Path) -> list[Path]:
    """The tables that follow from the files, which may be of several nodes and numbers of ranks, written.

    Raises ValueError for a file that is none, and for two of the same.
    """
    nodes: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        try:
            body: dict[str, Any] = json.loads(file.read_text())
            said = {name: body[name] for name in ("ranks", "unit", "commit", "command")}
            others = nodes.setdefault(body["node"], [])
            if body["node"] not in GPUS or any(other["ranks"] == body["ranks"] for other in others):
                raise ValueError(f"node {body['node']}, ranks {body['ranks']}")
            others.append(said | {"entries": entries_of(body["rows"], int(body["ranks"]))})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is no file of predicted times: {error!r}") from None
    written = []
    for node, bodies in nodes.items():
        entries = [entry for body in bodies for entry in body["entries"]]
        about = {"node": node, "unit": bodies[0]["unit"], "commit": ", ".join({b["commit"]: None for b in bodies})}
        about["command"] = "; ".join(body["command"] for body in bodies)
        for name in GPUS[node]:
            machine = measured.slug(name)
            path = folder / measured.file_of(machine)
            kept, _ = tables.kept(path, machine, "predicted", partial(measured.faults, machine=machine))
            tables.write(path, machine, "predicted", about, entries, kept)
            written.append(path)
    return written


def main(argv: Sequence[str] | None = None, folder: Path = measured.SHIPPED) -> int:
    """Write and say where; 2 for a file that is none."""
    files = list(sys.argv[1:] if argv is None else argv)
    if not files or files[0].startswith("-"):
        print(__doc__, file=sys.stderr if not files else sys.stdout)
        return 0 if files and files[0] in ("-h", "--help") else 2
    try:
        for path in write(list(map(Path, files)), folder):
            print(path)
    except ValueError as error:
        print(f"fusedtp.bench.predicted: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
