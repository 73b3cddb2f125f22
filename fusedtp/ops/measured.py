"""Measurements of a machine: their file, and the table of engines in it.

`fusedtp bench` writes one JSON file per machine, such as nvidia-h200.json, with tables by name:

    engines       which engine wins from how many rows on: below; `fusedtp bench crossover`, read by `engines.choose`
    predicted     the same from timed schedules, used if there is no table `engines`; `fusedtp.bench.predicted`
    triton-3.6    configurations of the kernels with that Triton: launch/tuned.py; `fusedtp bench tune`

The file is searched in the folder named by the environment variable FUSEDTP_TABLES, then in tables/ next to this file,
with the tables that ship with the package. The first file that has the table is used. It is read once per process.

Note [A table is believed whole or not at all]: all ranks must choose alike, and a call must not fail because of a file.
So a file that is damaged, for another machine, or in an unknown format is ignored, with one warning that names the file
and its fault. A table with an impossible entry is ignored too, with a warning that lists all its faults. Defaults apply
to everything in it. A digest of the content detects damage (and edits). Ranks that read different tables get an error:
the digest of the table that determines launches is part of every fused call's signature, and that of the table of
engines is compared when a group is made: Note [Facts of a rank] in engines.py.

An entry of `engines` applies to an operation, a dtype, a world size, how the ranks run ("processes", or "virtual" on
one device) and the width of the exchanged tensor: K of a gather, N of a reduction. Its fields are

    engines      [[0, "collective"], [1024, "triton"]]    from this many rows (of all ranks) on
    transports   [[0, "programs"], [8192, "copy"]]        of the fused gather; optional
    seconds      [[512, {"collective": 1e-4, ...}], ...]  the medians from which it was derived

Ranks share all inputs of the lookup and have compared the table, so they choose alike. A width between two measured
ones takes the nearer, if that is within a factor of four.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

ENVIRONMENT = "FUSEDTP_TABLES"
SHIPPED = Path(__file__).parent / "tables"
FORMAT = 2
FIELDS = ("format", "machine", "tables", "digest")
TABLE = ("measured", "entries")

Faults = list[str]


@dataclass(frozen=True)
class Table:
    """A valid table. `entries` as in the file; `digest` of the entries, 31 bits and not 0."""

    path: Path
    entries: list[dict[str, Any]]
    digest: int


def slug(name: str) -> str:
    """A machine's name as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@cache
def kind_of(device: torch.device) -> str:
    """The kind of GPU or CPU behind `device`: the same on all ranks of a machine, however they are pinned."""
    if device.type == "cuda":
        return slug(torch.cuda.get_device_properties(device).name)
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    name = found[1] if found else platform.machine()
    return slug(f"cpu {name} {torch.backends.cpu.get_cpu_capability()} {os.cpu_count()} cores")


def folders() -> list[Path]:
    """The folders that are searched for tables, the user's first."""
    named = os.environ.get(ENVIRONMENT, "")
    if named and not Path(named).is_dir():
        warnings.warn(f"{ENVIRONMENT} is {named!r}, which is not a folder; using the shipped tables", stacklevel=2)
    return [Path(named), SHIPPED] if named else [SHIPPED]


def file_of(machine: str) -> str:
    """The file name for this kind of machine."""
    return f"{machine}.json"


def digest_of(content: Any) -> str:
    """A digest of JSON content, independent of its formatting."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse(data: bytes, machine: str) -> dict[str, Any]:
    """The tables of a machine's file, by name: {"measured": how it was made, "entries": [...]}.

    Raises ValueError that says what is wrong with the file.
    """
    try:
        body = json.loads(data)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(body, dict) or type(body.get("format")) is not int:
        raise ValueError("field 'format' is missing or not an integer, so it is not a file of tables")
    if body["format"] != FORMAT:
        wrong = "newer than" if body["format"] > FORMAT else "unknown to"
        raise ValueError(f"field 'format' is {body['format']}, {wrong} this version of fusedtp, which reads {FORMAT}")
    if set(body) != set(FIELDS):
        odd = ", ".join(sorted(map(repr, set(body) ^ set(FIELDS))))
        raise ValueError(f"fields are missing or unknown: {odd}")
    digest = digest_of({name: value for name, value in body.items() if name != "digest"})
    if body["digest"] != digest:
        raise ValueError(f"field 'digest' does not match the content ({digest}): the file was damaged or edited")
    if body["machine"] != machine:
        raise ValueError(f"field 'machine' is {body['machine']!r}; it must be {machine!r}")
    tables = body["tables"]
    if not isinstance(tables, dict):
        raise ValueError("field 'tables' is not an object")
    for name, table in tables.items():
        if not isinstance(table, dict) or set(table) != set(TABLE):
            raise ValueError(f"table {name!r} must have exactly the fields {', '.join(TABLE)}")
        entries = table["entries"]
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            raise ValueError(f"field 'entries' of table {name!r} is not a list of objects")
    return tables


@cache
def _tables(path: Path, machine: str) -> dict[str, Any] | None:
    """The tables of a file; None, with a warning, if it is invalid."""
    try:
        return parse(path.read_bytes(), machine) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        _set_aside(str(path), [str(error)])
        return None


def read(name: str, machine: str, faults: Callable[[dict[str, Any]], Faults]) -> Table | None:
    """A table of this machine, or None. Never raises; warns if the table is invalid.

    faults   returns the faults of one entry
    """
    for folder in folders():
        path = folder / file_of(machine)
        tables = _tables(path, machine)
        if tables is None:
            return None
        if name in tables:
            entries = tables[name]["entries"]
            wrong = [f"entry {i}: {each}" for i, entry in enumerate(entries) for each in faults(entry)]
            if wrong:
                _set_aside(f"table {name!r} of {path}", wrong)
                return None
            return Table(path, entries, int(digest_of(entries), 16) % 0x7FFFFFFF + 1)
    return None


def _set_aside(what: str, wrong: Faults) -> None:
    shown = "; ".join(each[:200] for each in wrong[:5])
    more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    warnings.warn(f"{what} is ignored, and defaults are used instead: {shown}{more}", stacklevel=2)


def wrong_number(value: Any, least: int, most: int, power_of_two: bool = False) -> str:
    """What is wrong with a value of a table that must be a whole number; "" for nothing."""
    if type(value) is not int or not least <= value <= most:
        return f"must be a whole number from {least} to {most}, not {value!r}"
    if power_of_two and value & (value - 1):
        return f"must be a power of two, not {value}"
    return ""


GENERATION = [0]  # changes when tables are reloaded or overridden


def renew() -> None:
    """Invalidate every choice made from a table."""
    GENERATION[0] += 1


def say(message: str) -> None:
    """Warn on the first rank only: all ranks find the same, and one warning is enough."""
    if os.environ.get("RANK", "0") == "0":
        warnings.warn(message, stacklevel=2)


# -- the table of engines ---------------------------------------------------------------------------------------------

FUSED: list[str] = []  # operations with a fused kernel, by name, as they are declared
DTYPES = ("float32", "float64", "float16", "bfloat16")
RANKS = ("processes", "virtual")
ENGINES = ("collective", "chunked", "triton")  # a later one is chosen only where it wins
TRANSPORTS = ("programs", "copy")
MARGIN = 0.02
REACH = 4  # largest ratio between a call's width and a measured one

Steps = list[tuple[int, str]]


class Key(NamedTuple):
    """The key of an entry, except its width."""

    operation: str
    dtype: str
    world: int
    ranks: str


class Found(NamedTuple):
    """The table's choice for a call, and the reason; `engine` is "" if the table has none."""

    engine: str
    reason: str
    transport: str = "programs"


NOTHING = Found("", "no crossover table")


def fit(times: Mapping[int, Mapping[str, float]], names: Sequence[str]) -> Steps:
    """{rows: {name: seconds}} -> [(first rows, name)], with rows ascending from 0.

    The first of `names` is chosen unless a later one wins. A name wins from the smallest measured number of rows on
    such that, there and at every larger number, it beats each earlier name by more than MARGIN. So one slow sample can
    delay a crossover but never make an engine come and go. The choice at the smallest measured rows also holds below.
    """
    rows = sorted(times)
    steps: Steps = [(0, names[0])]
    for i, name in enumerate(names[1:], 1):
        first = None
        for at in reversed(rows):
            known = times[at]
            rivals = [known[other] for other in names[:i] if other in known]
            if name not in known or not all(known[name] * (1 + MARGIN) < rival for rival in rivals):
                break
            first = at
        if first is not None:
            begin = 0 if first == rows[0] else first
            steps = [step for step in steps if step[0] < begin] + [(begin, name)]
    return steps


def at(steps: Sequence[Sequence[Any]], rows: int) -> tuple[int, str]:
    """The step that applies to this number of rows."""
    begin, name = next(step for step in reversed(steps) if step[0] <= rows)
    return begin, name


_held: list[str] = []  # a transport that overrides the table


def find(machine: str, key: Key, rows: int, width: int) -> Found:
    """Look a call up in the table of this kind of machine. Never raises."""
    found = _find(machine, key, rows, width)
    return found._replace(transport=_held[0]) if _held else found


def hold(transport: str | None) -> None:
    """From now on gathers use this transport; None: the table's. For measurements; all ranks must do this alike."""
    _held[:] = [] if transport is None else [transport]
    renew()


@lru_cache(4096)
def _find(machine: str, key: Key, rows: int, width: int) -> Found:
    how, entries, _ = _table(machine)
    if not how:
        return NOTHING
    widths = entries.get(key, {})
    near = min(widths, key=lambda other: (max(width, other) / max(1, min(width, other)), other), default=0)
    if not near or max(width, near) > REACH * min(width, near):
        return Found("", f"not in the crossover table of {machine}")
    entry = widths[near]
    begin, engine = at(entry["engines"], rows)
    transport = at(entry.get("transports", [(0, TRANSPORTS[0])]), rows)[1]
    reason = f"{rows} rows, at least {begin}: {how} crossover of {machine}, width {near}"
    if engine == "triton" and transport == "copy":
        reason += ", rows by the copy engine"
    return Found(engine, reason, transport)


def forget() -> None:
    """Reload tables at the next call."""
    _tables.cache_clear()
    _table.cache_clear()
    _find.cache_clear()
    renew()


def source(machine: str) -> tuple[int, str]:
    """The table in use for this kind of machine: its digest and its name, or 0 and "none"."""
    return _table(machine)[2]


@cache
def _table(machine: str) -> tuple[str, dict[Key, dict[int, dict[str, Any]]], tuple[int, str]]:
    """How the table was made ("" if there is none), its entries, and its `source`."""
    entries: dict[Key, dict[int, dict[str, Any]]] = {}
    for name, how in (("engines", "measured"), ("predicted", "predicted")):
        table = read(name, machine, lambda entry: faults(entry, machine))
        if table is not None:
            for entry in table.entries:
                key = Key(*(entry[field] for field in Key._fields))
                entries.setdefault(key, {})[entry["width"]] = entry
            return how, entries, (table.digest, f"{table.path} ({how})")
    return "", entries, (0, "none")


def faults(entry: dict[str, Any], machine: str) -> Faults:
    """The faults of one entry in a table for this kind of machine."""
    found = []
    for name, known in (("operation", FUSED), ("dtype", DTYPES), ("ranks", RANKS)):
        if entry.get(name) not in known:
            found.append(f"field {name!r} is {entry.get(name)!r}; it must be one of {', '.join(known)}")
    for name, least in (("world", 2), ("width", 1)):
        wrong = wrong_number(entry.get(name), least, 1 << 40)
        found += [f"field {name!r} {wrong}"] if wrong else []
    runnable = ENGINES[:2] if machine.startswith("cpu-") else ENGINES
    found += _step_faults("engines", entry.get("engines"), runnable)
    if "transports" in entry:
        found += _step_faults("transports", entry["transports"], TRANSPORTS)
    odd = set(entry) - {*Key._fields, "width", "engines", "transports", "seconds"}
    return [*found, *(f"unknown field {name!r}" for name in sorted(odd))]


def _step_faults(name: str, steps: Any, known: Sequence[str]) -> Faults:
    pairs = isinstance(steps, list) and all(isinstance(step, list) and len(step) == 2 for step in steps)
    if not pairs or not steps:
        return [f"field {name!r} must be a non-empty list of pairs [rows, name]"]
    found = [f"{name}: {each!r} is not one of {', '.join(known)}" for _, each in steps if each not in known]
    for rows, _ in steps:
        wrong = wrong_number(rows, 0, 1 << 40)
        found += [f"{name}: rows {wrong}"] if wrong else []
    if not found and ([rows for rows, _ in steps] != sorted({rows for rows, _ in steps}) or steps[0][0] != 0):
        found.append(f"{name}: rows must start at 0 and increase")
    return found
