"""Shared by `tune` and `crossover`: their plan, and the only writer of a machine's file of tables.

fusedtp/ops/measured.py reads that file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fusedtp.ops import measured

from . import machine
from .options import Plan, Shared, filled, known
from .shapes import MODELS

Entry = dict[str, Any]


def kept(
    path: Path, machine: str, name: str, faults: Callable[[Entry], measured.Faults]
) -> tuple[dict[str, Any], list[Entry]]:
    """All tables of the file, and the entries of one. Raises ValueError for an invalid file or a bad entry."""
    try:
        tables = measured.parse(path.read_bytes(), machine) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    entries: list[Entry] = tables.get(name, {"entries": []})["entries"]
    wrong = [fault for entry in entries for fault in faults(entry)]
    if wrong:
        raise ValueError(f"{path}: {'; '.join(wrong)}")
    return tables, entries


def write(
    path: Path,
    machine: str,
    name: str,
    about: dict[str, Any],
    entries: Sequence[Entry],
    others: dict[str, Any],
) -> None:
    """Write the file atomically, with this table and the others.

    about   the origin of the table, for people: device, versions, commit, date, command
    """
    tables = others | {name: {"measured": about, "entries": list(entries)}}
    body = dict(format=measured.FORMAT, machine=machine, tables=tables)
    text = json.dumps(body | {"digest": measured.digest_of(body)}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(text)
    os.replace(beside, path)


def about(device: str, prog: str, argv: Sequence[str]) -> dict[str, Any]:
    """The origin of a table."""
    here = machine.describe_run(device, [])
    processors = os.cpu_count()
    if device == "cuda":
        processors = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "device": here["gpu"] or here["cpu"],
        "processors": processors,
        "driver": (here["gpu_state"] or {}).get("driver_version"),
        "torch": here["torch"],
        "triton": here["triton"],
        "commit": here["commit"],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join([prog, *argv]),
    }


def plan_of(
    options: Shared,
    defaults: Mapping[str, Sequence[str]],
    dtypes: Sequence[str],
    out: Path | None,
    faults: list[str],
) -> tuple[Plan, Path]:
    """(plan, folder of the file), with defaults filled in and checked; every fault is added to `faults`."""
    plan = filled(options, defaults, faults, dtypes)
    known("shapes", options.shapes, MODELS, faults)
    folder = folder_of(plan.device, out, options.save, faults)
    if not faults and plan.device == "cuda" and plan.world == "processes":
        most, here = max(plan.tp), torch.cuda.device_count()
        if most > here:
            need = "processes need a GPU each"
            faults.append(f"--tp {most}: {need}, but there are {here}; use --world virtual")
    return plan, folder


def folder_of(device: str, out: Path | None, save: bool, faults: list[str]) -> Path:
    """Folder of a table: bench/out/tables of a checkout, the shipped tables (--save), or another folder."""
    in_checkout = machine.in_checkout()
    if save and out is not None:
        faults.append("--save and --out cannot be combined")
    if save and device == "cpu":
        faults.append("--save is for tables of GPUs only: use --out")
    if save and not in_checkout:
        faults.append("--save needs a checkout of the repository: use --out")
    if save:
        return measured.SHIPPED
    return out or (machine.HERE / "out" / "tables" if in_checkout else Path("fusedtp-bench"))
