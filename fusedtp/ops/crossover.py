"""From how many rows on which engine is the fastest: measured by `fusedtp bench crossover`, read by `engines.choose`.

An entry holds for an operation, a dtype, a world size, how the ranks run ("processes", or "virtual" on one device) and
a width, that of the tensor that travels: K of a gather, N of a reduction. It says

    engines      [[0, "collective"], [1024, "triton"]]    from so many rows (of all ranks) on
    transports   [[0, "programs"], [8192, "copy"]]        of the fused gather; may be left out
    seconds      [[512, {"collective": 1e-4, ...}], ...]  the medians it was made from

All of it is shared by the ranks, so they choose alike; the engine is part of a call's signature, so that ranks with
different tables are told. A width between two measured ones takes the nearer, if that is within a factor of four.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from .measured import Faults, Table, read, renew, wrong_number

OPERATIONS = ("all_gather_matmul", "all_gather_wgrad", "matmul_reduce_scatter", "matmul_all_reduce")
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
    table, entries = _table(machine)
    if table is None:
        return NOTHING
    widths = entries.get(key, {})
    near = min(widths, key=lambda other: (max(width, other) / max(1, min(width, other)), other), default=0)
    if not near or max(width, near) > REACH * min(width, near):
        return Found("", f"not in the crossover table of {machine}")
    entry = widths[near]
    begin, engine = at(entry["engines"], rows)
    transport = at(entry.get("transports", [(0, TRANSPORTS[0])]), rows)[1]
    reason = f"{rows} rows, at least {begin}: measured crossover of {machine}, width {near}"
    if engine == "triton" and transport == "copy":
        reason += ", rows by the copy engine"
    return Found(engine, reason, transport)


def file_of(machine: str) -> str:
    """The name of the table of this kind of machine."""
    return f"{machine}.crossover.json"


def forget() -> None:
    """Read tables anew at the next call."""
    _table.cache_clear()
    _find.cache_clear()
    renew()


@cache
def _table(machine: str) -> tuple[Table | None, dict[Key, dict[int, dict[str, Any]]]]:
    table = read(file_of(machine), "crossover", machine, lambda entry: faults(entry, machine))
    entries: dict[Key, dict[int, dict[str, Any]]] = {}
    for entry in table.entries if table is not None else ():
        key = Key(*(entry[name] for name in Key._fields))
        entries.setdefault(key, {})[entry["width"]] = entry
    return table, entries


def faults(entry: dict[str, Any], machine: str) -> Faults:
    """What is wrong with one entry of a table of this kind of machine."""
    found = []
    for name, known in (("operation", OPERATIONS), ("dtype", DTYPES), ("ranks", RANKS)):
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
