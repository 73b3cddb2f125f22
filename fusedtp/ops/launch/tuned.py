"""Which configuration was fastest on this kind of GPU: looked up in a table, never searched for in a call.

An entry belongs to a kernel, a dtype and a shape class: every extent rounded up to a power of two (rows beyond 32768,
which fill any GPU, count as 32768), and exactly: the world size, how many programs run at once (a GPU's
multiprocessors, or a rank's part of them), and whether VECTOR divides the rows of the output.

Note [What a class may hold]: ranks must agree on how a tensor that travels is cut, and a rank knows its own N_i or K_r
only, which may differ. So what must agree stands in entries whose class has no extent but those that all ranks share:

    kernel                  class                                  sets
    matmul                  rows M, cols N, k K                    tile, tma, specialized, halves
    all_gather_matmul       rows T, cols N of this rank, k K       tile: each rank cuts its own output as it likes; tma
    all_gather_wgrad        rows N of this rank, cols K, k T       tile, tma
    all_gather              rows of the longest shard, k K         chunk, how many programs send; of both gathers
    matmul_reduce_scatter   rows of the longest shard, cols N      tile, tma, chunk, programs: the owner sums by the
    one_shot, two_shot      rows a rank sums, cols N               senders' tiles; K_r is not asked for

A missing entry means the default of config.py. `report()` lists what was looked up and found; the first miss warns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

import torch

from fusedtp.ops.measured import Table, read, renew, say

from .config import Config, Machine
from .tuned_entries import EXACT, KERNELS, SPLIT, SWITCHES, faults, key_of

MOST_ROWS = 1 << 15
NOTHING: Mapping[str, int] = {}

_seen: dict[tuple[str, str, tuple[int, ...]], str] = {}  # (kernel, dtype, class) -> where its values are from
_told: list[str] = []  # the first default that was taken, which is warned of
_tried: dict[str, Mapping[str, int]] = {}
_remembered: list[Callable[[], None]] = []


def bucket(axis: str, extent: int) -> int:
    """The extent of a class: itself, or the next power of two."""
    if axis in EXACT or extent <= 1:
        return int(extent)
    rounded: int = 1 << (extent - 1).bit_length()
    return min(rounded, MOST_ROWS) if axis == "rows" else rounded


def shape_class(kernel: str, machine: Machine, **extents: int) -> tuple[int, ...]:
    """The class of a call, in the order of the kernel's axes."""
    known = extents | {"programs": machine.programs}
    return tuple(bucket(axis, known[axis]) for axis in KERNELS[kernel].axes)


def lookup(kernel: str, machine: Machine, dtype: torch.dtype, **extents: int) -> Mapping[str, int]:
    """Fields of Config that the table of this GPU sets for this call; empty where it has none. Never raises."""
    tried = _tried.get(kernel) if _tried else None
    return tried if tried is not None else _lookup(kernel, machine, dtype, **extents)


def tile(default: Config, found: Mapping[str, int]) -> Config:
    """The tile that an entry sets, or the default.

    What an entry does not name is as in `Config` itself, but TMA, which is the machine's matter: as in the default.
    """
    if not found:
        return default
    values: dict[str, Any] = {"tma": default.tma} | {n: v for n, v in found.items() if n not in SPLIT}
    return Config(**values | {name: bool(values[name]) for name in SWITCHES if name in values})


def chunk(found: Mapping[str, int], default: int, least: int) -> int:
    """What a flag covers, and no less than the flags that there are demand."""
    return max(1, found.get("chunk", default), least)


def gather_split(found: Mapping[str, int], machine: Machine, default: tuple[int, int]) -> tuple[int, int]:
    """(senders, others). On a GPU that ranks share the default, by which all programs of a rank fit its part."""
    if machine.shared_gpu or "send_programs" not in found:
        return default
    senders = min(found["send_programs"], max(1, machine.programs - 1))
    return senders, max(1, machine.programs - senders)


def reduce_split(found: Mapping[str, int], machine: Machine, default: tuple[int, int]) -> tuple[int, int]:
    """(senders, reducers), likewise."""
    if machine.shared_gpu:
        return default
    return found.get("send_programs", default[0]), found.get("other_programs", default[1])


@lru_cache(4096)
def _lookup(kernel: str, machine: Machine, dtype: torch.dtype, **extents: int) -> Mapping[str, int]:
    if not machine.name:  # a GPU that is not here: the compiler's and the simulator's
        return NOTHING
    name = str(dtype).removeprefix("torch.")
    key = kernel, name, shape_class(kernel, machine, **extents)
    table, entries = _table(machine)
    found = entries.get(key, NOTHING)
    if table is not None:
        where = str(table.path) if found else f"default: {table.path} has no such entry"
    else:
        where = f"default: {_file(machine.name)} was not found, or not good"
    _miss(machine, found, where, key)
    _seen[key] = where
    return found


def _miss(
    machine: Machine, found: Mapping[str, int], where: str, key: tuple[str, str, tuple[int, ...]]
) -> None:
    """Say once that a default is used; the interpreter has no speed to lose."""
    if found or machine.clock == "host" or _told:
        return
    _told.append(where)
    say(
        f"kernels run in their default configuration where none was tuned; the first is {described(*key)}: {where} "
        "(fusedtp.ops.launch.tuned.report() lists all; `fusedtp bench tune` measures)"
    )


def described(kernel: str, dtype: str, at: tuple[int, ...]) -> str:
    """One line that names an entry."""
    return f"{kernel} {dtype} " + " ".join(
        f"{axis} {n}" for axis, n in zip(KERNELS[kernel].axes, at, strict=True)
    )


def report() -> list[str]:
    """What this process has looked up, a line each, and where its values are from."""
    return [f"{described(*key)}: {where}" for key, where in sorted(_seen.items())]


def summary() -> str:
    """One line on what this process has looked up; "" where it launched nothing."""
    if not _seen:
        return ""
    default = sum(where.startswith("default") for where in tuple(_seen.values()))
    counts = f"{len(_seen) - default} tuned, {default} default"
    return f"configurations of kernels so far: {counts} (fusedtp.ops.launch.tuned.report() lists them)"


def digest(machine: Machine) -> int:
    """Of the table in use, 0 of none: what the signature of a fused call carries."""
    if _tried or not machine.name:
        return 0
    table = _table(machine)[0]
    return 0 if table is None else table.digest


def remembered(function: Callable[..., Config]) -> Callable[..., Config]:
    """A function of values that launches are cut by, with what it gave until tables or held values change."""
    kept = lru_cache(4096)(function)
    _remembered.append(kept.cache_clear)
    return kept


def hold(kernel: str, values: Mapping[str, int] | None) -> None:
    """From now on launch this kernel with these values ({}: the default), whatever a table says; None: no longer.

    For a tuner: all ranks do so alike, between calls.
    """
    _forget_remembered()
    if values is None:
        _tried.pop(kernel, None)
    else:
        _tried[kernel] = dict(values)
    renew()


def forget() -> None:
    """Read tables anew at the next call."""
    _forget_remembered()
    _table.cache_clear()
    _read.cache_clear()
    _lookup.cache_clear()
    _seen.clear()
    _told.clear()
    renew()


def _forget_remembered() -> None:
    for clear in _remembered:
        clear()
    renew()


def file_of(machine: Machine) -> str:
    """The name of the file with the configurations of this kind of machine, and of the Triton that is installed."""
    return _file(machine.name)


@cache
def _file(name: str) -> str:
    import triton

    return f"{name}.triton-{'.'.join(triton.__version__.split('.')[:2])}.json"


Entries = dict[tuple[str, str, tuple[int, ...]], Mapping[str, int]]


@cache
def _table(machine: Machine) -> tuple[Table | None, Entries]:
    return _read(machine.name, machine.clock, machine.shared_bytes, machine.capability)


@cache
def _read(name: str, clock: str, shared_bytes: int, capability: int) -> tuple[Table | None, Entries]:
    """Once for a GPU, however many ranks share it."""
    file, machine = _file(name), Machine(clock, 0, shared_bytes, name=name, capability=capability)
    table = read(file, "configurations", file.removesuffix(".json"), lambda entry: faults(entry, machine))
    return table, {} if table is None else {key_of(entry): entry["config"] for entry in table.entries}
