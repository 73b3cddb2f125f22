"""What was measured on a machine: the file that holds it, and the table of engines in it.

`fusedtp bench` writes one JSON file a machine, nvidia-h200.json, of tables by name:

    engines       which engine wins from how many rows on: below; `fusedtp bench crossover`, read by `engines.choose`
    predicted     the same by timed schedules, asked where there is no table `engines`; `fusedtp.bench.predicted`
    triton-3.6    configurations of the kernels with that Triton: launch/tuned.py; `fusedtp bench tune`

The file is looked for in the folder that the environment variable FUSEDTP_TABLES names, then in tables/ beside this
file, where the ones lie that ship with the package. The first file that has the table counts. It is read once a
process.

Note [A table is believed whole or not at all]: what a rank does must be what its peers do, and a call must not fail
because of a file. So a file that is damaged, of another machine, or of a format that is not known here is set aside
with one warning that names the file and its fault; so is a table with an impossible entry, with all its faults; and
the defaults hold for everything in it. A digest over the content tells damage (and edits) from data. Ranks that read
different tables are told so: the digest of the one that launches are cut by is part of every fused call's signature,
as the engine is.

An entry of `engines` holds for an operation, a dtype, a world size, how the ranks run ("processes", or "virtual" on
one device) and a width, that of the tensor that travels: K of a gather, N of a reduction. It says

    engines      [[0, "collective"], [1024, "triton"]]    from so many rows (of all ranks) on
    transports   [[0, "programs"], [8192, "copy"]]        of the fused gather; may be left out
    seconds      [[512, {"collective": 1e-4, ...}], ...]  the medians it was made from

All of it is shared by the ranks, so they choose alike; the engine is part of a call's signature, so that ranks with
different tables are told. A width between two measured ones takes the nearer, if that is within a factor of four.
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
        warnings.warn(f"{ENVIRONMENT} is {named!r}, which is no folder: the shipped tables are used", stacklevel=2)
    return [Path(named), SHIPPED] if named else [SHIPPED]


def file_of(machine: str) -> str:
    """The name of the file of this kind of machine."""
    return f"{machine}.json"


def digest_of(content: Any) -> str:
    """Of JSON; how it is indented does not count."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parse(data: bytes, machine: str) -> dict[str, Any]:
    """The tables of a machine's file, by name: {"measured": how it came about, "entries": [...]}.

    Raises ValueError that says what is wrong with the file.
    """
    try:
        body = json.loads(data)
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
    if not isinstance(body, dict) or type(body.get("format")) is not int:
        raise ValueError("field 'format' is missing, so it is no file of tables")
    if body["format"] != FORMAT:
        wrong = "is newer than this version of fusedtp reads" if body["format"] > FORMAT else "is not known"
        raise ValueError(f"field 'format' is {body['format']}, which {wrong} ({FORMAT})")
    if set(body) != set(FIELDS):
        odd = ", ".join(sorted(map(repr, set(body) ^ set(FIELDS))))
        raise ValueError(f"fields are missing or unknown: {odd}")
    digest = digest_of({name: value for name, value in body.items() if name != "digest"})
    if body["digest"] != digest:
        raise ValueError(f"field 'digest' is not that of the content, {digest}: damaged, or edited")
    if body["machine"] != machine:
        raise ValueError(f"field 'machine' is {body['machine']!r}, wanted is {machine!r}")
    tables = body["tables"]
    if not isinstance(tables, dict):
        raise ValueError("field 'tables' is not an object")
    for name, table in tables.items():
        if not isinstance(table, dict) or set(table) != set(TABLE):
            raise ValueError(f"table {name!r} has not the fields {', '.join(TABLE)}")
        entries = table["entries"]
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            raise ValueError(f"field 'entries' of table {name!r} is not a list of objects")
    return tables


@cache
def _tables(path: Path, machine: str) -> dict[str, Any] | None:
    """The tables of a file; None of one that is not good, which is warned of."""
    try:
        return parse(path.read_bytes(), machine) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        _set_aside(str(path), [str(error)])
        return None


def read(name: str, machine: str, faults: Callable[[dict[str, Any]], Faults]) -> Table | None:
    """A table of this machine, or None. Never raises: what is wrong with it is warned of.

    faults   of one entry
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
    warnings.warn(f"{what} is not used, and defaults in its place: {shown}{more}", stacklevel=2)


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


# -- the table of engines ---------------------------------------------------------------------------------------------

FUSED: list[str] = []  # operations with a fused kernel, by name, as they are declared
DTYPES = ("float32", "float64", "float16", "bfloat16")
RANKS = ("processes", "virtual")
ENGINES = ("collective", "chunked", "triton")  # a later one is taken only where it wins
TRANSPORTS = ("programs", "copy")
MARGIN = 0.02
REACH = 4  # of a width

Steps = list[tuple[int, str]]


class Key(NamedTuple):
    """What the rows are counted for, beside a width."""

    operation: str
    dtype: str
    world: int
    ranks: str


class Found(NamedTuple):
    """What the table says of a call; `engine` "" where it says nothing, and `reason` why."""

    engine: str
    reason: str
    transport: str = "programs"


NOTHING = Found("", "no crossover table")


def fit(times: Mapping[int, Mapping[str, float]], names: Sequence[str]) -> Steps:
    """rows -> name -> seconds, to [(first rows, name)], rows rising from 0.

    Among `names`, the first is taken unless a later one wins: from the smallest measured number of rows on at which,
    and at every larger one too, it beats each of those before it by more than MARGIN. So one slow sample can delay a
    crossover but never make an engine come and go. Below the smallest measured rows, what holds there holds too.
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
    """The step that holds for so many rows."""
    begin, name = next(step for step in reversed(steps) if step[0] <= rows)
    return begin, name


_held: list[str] = []  # a transport, whatever the table says


def find(machine: str, key: Key, rows: int, width: int) -> Found:
    """What the table of this kind of machine says. Never raises."""
    found = _find(machine, key, rows, width)
    return found._replace(transport=_held[0]) if _held else found


def hold(transport: str | None) -> None:
    """From now on gathers go by this transport; None: by the table's again. To measure it: all ranks do so alike."""
    _held[:] = [] if transport is None else [transport]
    renew()


@lru_cache(4096)
def _find(machine: str, key: Key, rows: int, width: int) -> Found:
    how, entries = _table(machine)
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
    """Read tables anew at the next call."""
    _tables.cache_clear()
    _table.cache_clear()
    _find.cache_clear()
    renew()


@cache
def _table(machine: str) -> tuple[str, dict[Key, dict[int, dict[str, Any]]]]:
    """How the table came about, "" of none, and its entries."""
    entries: dict[Key, dict[int, dict[str, Any]]] = {}
    for name, how in (("engines", "measured"), ("predicted", "predicted")):
        table = read(name, machine, lambda entry: faults(entry, machine))
        if table is not None:
            for entry in table.entries:
                key = Key(*(entry[field] for field in Key._fields))
                entries.setdefault(key, {})[entry["width"]] = entry
            return how, entries
    return "", entries


def faults(entry: dict[str, Any], machine: str) -> Faults:
    """What is wrong with one entry of a table of this kind of machine."""
    found = []
    for name, known in (("operation", FUSED), ("dtype", DTYPES), ("ranks", RANKS)):
        if entry.get(name) not in known:
            found.append(f"field {name!r} is {entry.get(name)!r}; known are {', '.join(known)}")
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
        return [f"field {name!r} is no list of pairs [rows, name]"]
    found = [f"{name}: {each!r} is not one of {', '.join(known)}" for _, each in steps if each not in known]
    for rows, _ in steps:
        wrong = wrong_number(rows, 0, 1 << 40)
        found += [f"{name}: rows {wrong}"] if wrong else []
    if not found and ([rows for rows, _ in steps] != sorted({rows for rows, _ in steps}) or steps[0][0] != 0):
        found.append(f"{name}: rows must rise from 0")
    return found
