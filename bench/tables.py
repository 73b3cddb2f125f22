"""The one writer of a machine's file of tables (fusedtp/ops/measured.py reads it)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fusedtp.ops import measured

Entry = dict[str, Any]


def kept(
    path: Path, machine: str, name: str, faults: Callable[[Entry], measured.Faults]
) -> tuple[dict[str, Any], list[Entry]]:
    """All tables of the file and the entries of one. Raises ValueError for a file that is none, or a bad entry."""
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
    """Make or replace the file in one step, with this table and the others.

    about   how the table came about, for people: device, versions, commit, date, command
    """
    tables = others | {name: {"measured": about, "entries": list(entries)}}
    body = dict(format=measured.FORMAT, machine=machine, tables=tables)
    text = json.dumps(body | {"digest": measured.digest_of(body)}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(text)
    os.replace(beside, path)
