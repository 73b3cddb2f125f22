"""Tables of what was measured on a machine: where they lie, who may read one, what is wrong with it.

A table is a JSON file that `fusedtp bench` wrote:

    nvidia-h200.triton-3.6.json    configurations of the kernels, by GPU and Triton: launch/tuned.py
    nvidia-h200.crossover.json     which engine wins from how many rows on, by machine: crossover.py

It is looked for in the folder that the environment variable FUSEDTP_TABLES names, then in tables/ beside this file,
where the ones lie that ship with the package. The first file of the name counts. It is read once a process.

Note [A table is believed whole or not at all]: what a rank does must be what its peers do, and a call must not fail
because of a file. So a table that is damaged, of another machine, or of a format that is not known here is set aside
with one warning that names the file and all its faults, and the defaults hold for everything in it. A digest over
the content tells damage (and edits) from data. Ranks that read different tables are told so: the digest of the one
that launches are cut by is part of every fused call's signature, as the engine is.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = "FUSEDTP_TABLES"
SHIPPED = Path(__file__).parent / "tables"
FORMAT = 1
FIELDS = ("format", "table", "machine", "measured", "entries", "digest")

Faults = list[str]


@dataclass(frozen=True)
class Table:
    """A table that was found good. `entries` as in the file; `digest` of what it says, 31 bits and not 0."""

    path: Path
    entries: list[dict[str, Any]]
    digest: int


def slug(name: str) -> str:
    """A machine's name as a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@cache
def kind_of(device: torch.device) -> str:
    """The kind of GPU behind `device`, or of CPU: the same on all ranks of a machine, however they are pinned."""
    if device.type == "cuda":
        return slug(torch.cuda.get_device_properties(device).name)
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    name = found[1] if found else platform.machine()
    return slug(f"cpu {name} {torch.backends.cpu.get_cpu_capability()} {os.cpu_count()} cores")


def folders() -> list[Path]:
    """Where tables are looked for, the user's first."""
    named = os.environ.get(ENVIRONMENT, "")
    if named and not Path(named).is_dir():
        warnings.warn(
            f"{ENVIRONMENT} is {named!r}, which is no folder: the shipped tables are used", stacklevel=2
        )
    return [Path(named), SHIPPED] if named else [SHIPPED]


def digest_of(body: dict[str, Any]) -> str:
    """Over all but the digest itself; how the file is indented does not count."""
    rest = {name: value for name, value in body.items() if name != "digest"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(
    path: Path, table: str, machine: str, measured: dict[str, Any], entries: list[dict[str, Any]]
) -> None:
    """Make or replace the file `path` in one step.

    table      what it holds: "configurations", "crossover"
    measured   how it came about, for people: device, versions, commit, date, command
    """
    body = dict(format=FORMAT, table=table, machine=machine, measured=measured, entries=entries)
    text = json.dumps(body | {"digest": digest_of(body)}, indent=1) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(text)
    os.replace(beside, path)


def parse(data: bytes, table: str, machine: str) -> dict[str, Any]:
    """The content of a table's file. Raises ValueError that says what is wrong with it."""
    try:
        body = json.loads(data)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(body, dict) or type(body.get("format")) is not int:
        raise ValueError("field 'format' is missing, so it is no table")
    if body["format"] != FORMAT:
        wrong = "is newer than this version of fusedtp reads" if body["format"] > FORMAT else "is not known"
        raise ValueError(f"field 'format' is {body['format']}, which {wrong} ({FORMAT})")
    if set(body) != set(FIELDS):
        odd = ", ".join(sorted(map(repr, set(body) ^ set(FIELDS))))
        raise ValueError(f"fields are missing or unknown: {odd}")
    if body["digest"] != digest_of(body):
        raise ValueError(f"field 'digest' is not that of the content, {digest_of(body)}: damaged, or edited")
    for name, wanted in (("table", table), ("machine", machine)):
        if body[name] != wanted:
            raise ValueError(f"field {name!r} is {body[name]!r}, wanted is {wanted!r}")
    if not isinstance(body["entries"], list) or not all(isinstance(each, dict) for each in body["entries"]):
        raise ValueError("field 'entries' is not a list of objects")
    return body


def read(name: str, table: str, machine: str, faults: Callable[[dict[str, Any]], Faults]) -> Table | None:
    """The table in the first file of this name, or None. Never raises: what is wrong with a file is warned of.

    faults   of one entry
    """
    for folder in folders():
        path = folder / name
        try:
            if not path.is_file():
                continue
            body = parse(path.read_bytes(), table, machine)
            wrong = [
                f"entry {i}: {each}" for i, entry in enumerate(body["entries"]) for each in faults(entry)
            ]
        except (OSError, ValueError, RecursionError) as error:
            wrong = [str(error)]
        if wrong:
            shown = "; ".join(each[:200] for each in wrong[:5])
            more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            warnings.warn(f"{path} is not used, and defaults in its place: {shown}{more}", stacklevel=2)
            return None
        return Table(path, body["entries"], int(body["digest"], 16) % 0x7FFFFFFF + 1)
    return None


def wrong_number(value: Any, least: int, most: int, power_of_two: bool = False) -> str:
    """What is wrong with a value of a table that must be a whole number; "" for nothing."""
    if type(value) is not int or not least <= value <= most:
        return f"must be a whole number from {least} to {most}, not {value!r}"
    if power_of_two and value & (value - 1):
        return f"must be a power of two, not {value}"
    return ""


GENERATION = [0]  # changes when tables are read anew or values are held in their place


def renew() -> None:
    """Invalidate every choice made from a table."""
    GENERATION[0] += 1


def say(message: str) -> None:
    """Warn, on the first rank only: what all ranks find alike need not be told by each."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(message, stacklevel=2)
