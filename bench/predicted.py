"""python -m fusedtp.bench.predicted FILE ...: tables of engines from predicted times, for GPUs without measured ones.

`python -m fusedtp.bench.timed --sizes --tp RANKS --save FILE` writes FILE. All files of one node, one for each number
of ranks, make the table `predicted` of each kind of GPU that the node represents. The table is written to
fusedtp/ops/tables and ships with the package; `engine="auto"` reads it if there is no table of measured times. A fused
kernel is chosen only if it is predicted to be MARGIN times as fast as matmul and collective one after the other,
because predictions are up to a quarter too low (docs/timed-schedule.md). The copy engine takes more driver calls, so a
gather uses it only from the first size on that gains a factor of GAIN, if no larger size loses.
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
GPUS = {  # node -> torch's names of its GPUs
    "h100": ("NVIDIA H100 80GB HBM3",),
    "h200": ("NVIDIA H200",),
    "a100": ("NVIDIA A100-SXM4-80GB",),
}
LIKE = {"all_gather_matmul": ("all_gather_matmul", "all_gather_gated_matmul")}  # they send the same data
DTYPES = ("bfloat16", "float16")  # predictions apply to both; fp16 is as fast


def steps_of(fused: Mapping[int, bool]) -> measured.Steps:
    """{rows: whether the fused kernel wins} -> [(first rows, engine)], with rows rising from 0.

    Between two sizes the fused kernel is chosen if it wins at both. Few rows have separate kernels, so it may win, lose
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
    """The transport of a gather, by the number of rows of all ranks. times: rows -> "fused" and perhaps "copied"."""
    steps: measured.Steps = [(0, "programs")]
    for at in sorted(times, reverse=True):
        copied = times[at].get("copied", inf)
        if copied > times[at]["fused"]:
            break
        if copied * GAIN <= times[at]["fused"]:
            steps[1:] = [(at, "copy")]
    return steps


def entries_of(rows: Mapping[str, Mapping[str, float]], ranks: int) -> list[tables.Entry]:
    """The table's entries for groups of this many ranks, for each operation, width and dtype.

    rows   "operation model tokens" -> microseconds: "unfused", "fused" and, for a gather by copies, "copied"
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
    """Write the tables made from the files, which may be of several nodes and numbers of ranks; returns their paths.

    Raises ValueError for an invalid file, and for two files of the same node and number of ranks.
    """
    nodes: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        try:
            body: dict[str, Any] = json.loads(file.read_text())
            said = {name: body[name] for name in ("ranks", "unit", "commit", "command")}
            others = nodes.setdefault(body["node"], [])
            if body["node"] not in GPUS or any(other["ranks"] == body["ranks"] for other in others):
                raise ValueError(f"node {body['node']} with {body['ranks']} ranks is unknown or given twice")
            others.append(said | {"entries": entries_of(body["rows"], int(body["ranks"]))})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} is not a file of predicted times: {error!r}") from None
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
    """Write the tables and print their paths; 2 for an invalid file."""
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
