"""Tuned configurations: the fastest ones on this kind of GPU, looked up in a table, never searched at run time.

An entry belongs to a kernel, a dtype and a shape class. Extents are rounded up to a power of two (rows beyond 32768,
which fill any GPU, count as 32768). Other parts of the class are exact: the world size, how many programs run at once
(a GPU's SMs, or a rank's part of them), and whether VECTOR divides the rows of the output.

Note [What a class may hold]: ranks must agree on how an exchanged tensor is split, but a rank knows only its own N_i or
K_r, which may differ. So values on which ranks must agree belong to entries whose class has only shared extents:

    kernel                  class                                  sets
    matmul                  rows M, cols N, k K                    tile, tma, specialized, halves
    all_gather_matmul       rows T, cols N of this rank, k K       tile, tma: each rank may tile its own output freely
    all_gather_wgrad        rows N of this rank, cols K, k T       tile, tma
    all_gather              rows of the longest shard, k K         chunk, number of sending programs, if programs send
    matmul_reduce_scatter   rows of the longest shard, cols N      tile, tma, chunk, programs: the owner sums in the
    one_shot, two_shot      rows a rank sums, cols N               senders' tiles, not K_r; one_shot has no chunk
    few_rows                rows T, cols N                         likewise; a tile has at least T rows

A missing entry means the default of config.py. `report()` lists lookups and their results; the first miss warns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from fusedtp.ops import measured
from fusedtp.ops.measured import Faults, Table, renew, say, wrong_number

from .config import MOST_STAGES, Config, Machine

NEEDED = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
TILE = (*NEEDED, "group", "part", "max_registers")
SPLIT = ("chunk", "send_programs")
SWITCHES = ("tma", "specialized", "halves")  # 0 or 1
LIMITS = {  # least, most, a power of two
    "block_m": (16, 256, True),
    "block_n": (16, 256, True),
    "block_k": (16, 256, True),
    "num_warps": (1, 16, True),
    "num_stages": (1, MOST_STAGES, False),
    "group": (1, 64, False),
    "part": (32, 4096, True),
    "max_registers": (0, 255, False),
    "tma": (0, 1, False),
    "specialized": (0, 1, False),
    "halves": (0, 1, False),
    "chunk": (1, 1 << 16, False),
    "send_programs": (1, 4096, False),
}
EXACT = ("even", "world", "programs")
REGISTERS = 1 << 16  # per SM


class Kernel(NamedTuple):
    """The axes of a kernel's shape classes, and the fields that its entries set."""

    axes: tuple[str, ...]
    sets: tuple[str, ...]


_SUM = ("rows", "cols", "even", "world", "programs")
_SCATTER = Kernel(_SUM, (*TILE, "tma", *SPLIT))
_GATHER = Kernel(("rows", "cols", "k", "even", "world", "programs"), (*TILE, "tma"))
KERNELS = {
    "matmul": Kernel(("rows", "cols", "k", "even", "programs"), (*TILE, *SWITCHES)),
    "all_gather_matmul": _GATHER,
    "all_gather_wgrad": _GATHER,
    "all_gather": Kernel(("rows", "k", "world", "programs"), SPLIT),
    "matmul_reduce_scatter": _SCATTER,
    "one_shot": Kernel(_SUM, (*TILE, "tma", "send_programs")),
    "two_shot": _SCATTER,
    "few_rows": _SCATTER,
}
DTYPES = ("float32", "float16", "bfloat16")


def key_of(entry: dict[str, Any]) -> tuple[str, str, tuple[int, ...]]:
    """The key of a table's entry: (kernel, dtype, class)."""
    axes = KERNELS[entry["kernel"]].axes
    return entry["kernel"], entry["dtype"], tuple(entry["class"][axis] for axis in axes)


def faults(entry: dict[str, Any], machine: Machine) -> Faults:
    """The faults of one entry {"kernel", "dtype", "class", "config"} in a table for this kind of machine."""
    if not (isinstance(entry.get("kernel"), str) and entry["kernel"] in KERNELS):
        return [f"field 'kernel' is {entry.get('kernel')!r}; it must be one of {', '.join(KERNELS)}"]
    kernel, found = KERNELS[entry["kernel"]], []
    if entry.get("dtype") not in DTYPES:
        found.append(f"field 'dtype' is {entry.get('dtype')!r}; it must be one of {', '.join(DTYPES)}")
    odd = set(entry) - {"kernel", "dtype", "class", "config", "seconds", "default_seconds", "shapes"}
    found += [f"unknown field {name!r}" for name in sorted(odd)]
    at = entry.get("class")
    if not isinstance(at, dict) or set(at) != set(kernel.axes):
        found.append(f"field 'class' must give {', '.join(kernel.axes)}, not {at!r}")
    else:
        for axis, value in at.items():
            wrong = wrong_number(value, 0, 1 << 40, axis not in EXACT)
            found += [f"class.{axis} {wrong}"] if wrong else []
    values = entry.get("config")
    if not isinstance(values, dict):
        return [*found, f"field 'config' must be an object, not {values!r}"]
    return [
        *found,
        *(f"config.{each}" for each in config_faults(kernel, values, str(entry["dtype"]), machine)),
    ]


def config_faults(kernel: Kernel, values: Mapping[str, Any], dtype: str, machine: Machine) -> Faults:
    """Reasons why a kernel cannot run with these values on this machine. Bytes and registers are lower bounds."""
    found = [f"{name} is not a field of this kernel" for name in values if name not in kernel.sets]
    found += [f"{name} is missing" for name in NEEDED if name in kernel.sets and name not in values]
    for name in kernel.sets:
        wrong = wrong_number(values[name], *LIMITS[name]) if name in values else ""
        found += [f"{name} {wrong}"] if wrong else []
    if found or machine.clock == "host" or "block_m" not in values:
        return found
    m, n, k = values["block_m"], values["block_n"], values["block_k"]
    width = 4 if dtype == "float32" else 2
    shared = max(1, values["num_stages"] - 1) * (m + n) * k * width
    if shared > machine.shared_bytes:
        stages, most = values["num_stages"], machine.shared_bytes
        found.append(f"num_stages {stages} needs {shared} bytes of shared memory; there are {most}")
    lanes = 32 * values["num_warps"]
    registers = values.get("max_registers", 0)
    if machine.clock == "cuda" and lanes * max(registers, m * n // lanes) > REGISTERS:
        found.append(
            f"max_registers {registers}: {lanes} threads with a tile of {m} x {n} need more than {REGISTERS} registers"
        )
    if machine.clock != "cuda" and registers:
        found.append(f"max_registers {registers} is supported on CUDA only")
    if machine.clock == "cuda" and 0 < registers < 32:
        found.append(f"max_registers {registers} is too few; it must be at least 32")
    return [*found, *_switch_faults(values, dtype, machine)]


def _switch_faults(values: Mapping[str, Any], dtype: str, machine: Machine) -> Faults:
    """Switches that are on but unsupported by this machine or dtype."""
    found = []
    if values.get("tma") and (machine.capability < 90 or dtype == "float32"):
        found.append(f"tma needs sm_90 or later and a 16-bit dtype; this is sm_{machine.capability}, {dtype}")
    if values.get("specialized"):
        if not values.get("tma") or machine.capability // 10 != 10:
            found.append("specialized needs tma and sm_100: see Note [Warp specialisation] in kernels/matmul.py")
        if values.get("max_registers"):
            found.append("max_registers limits all warps alike, so it cannot be combined with specialized")
    return found


assert set(LIMITS) <= {field.name for field in fields(Config)}


# -- lookup -----------------------------------------------------------------------------------------------------------

MOST_ROWS = 1 << 15
NOTHING: Mapping[str, int] = {}

_seen: dict[tuple[str, str, tuple[int, ...]], str] = {}  # (kernel, dtype, class) -> the source of its values
_told: list[str] = []  # the first default that was used; a warning names it
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
    """Fields of Config that this GPU's table sets for this call; empty if it has no entry. Never raises."""
    tried = _tried.get(kernel) if _tried else None
    return tried if tried is not None else _lookup(kernel, machine, dtype, **extents)


def tile(default: Config, found: Mapping[str, int]) -> Config:
    """The tile that an entry sets, or the default.

    Fields missing from an entry take the defaults of `Config`, except TMA, which depends on the machine: it is taken
    from `default`.
    """
    if not found:
        return default
    values: dict[str, Any] = {"tma": default.tma} | {n: v for n, v in found.items() if n not in SPLIT}
    return Config(**values | {name: bool(values[name]) for name in SWITCHES if name in values})


def chunk(found: Mapping[str, int], default: int, least: int) -> int:
    """What a flag covers: at least `least`, so that the available flags suffice."""
    return max(1, found.get("chunk", default), least)


def gather_split(found: Mapping[str, int], machine: Machine, default: tuple[int, int]) -> tuple[int, int]:
    """(senders, others). If ranks share a GPU, the default, with which a rank's programs fit in its part of the GPU."""
    if machine.shared_gpu or "send_programs" not in found:
        return default
    senders = min(found["send_programs"], max(1, machine.programs - 1))
    return senders, max(1, machine.programs - senders)


def programs(found: Mapping[str, int], machine: Machine) -> int:
    """Programs of a kernel that has no separate senders; if ranks share a GPU, as many as fit in this rank's part."""
    return machine.programs if machine.shared_gpu else found.get("send_programs", machine.programs)


@lru_cache(4096)
def _lookup(kernel: str, machine: Machine, dtype: torch.dtype, **extents: int) -> Mapping[str, int]:
    if not machine.name:  # a GPU that this host lacks: a target of the compiler or the simulator
        return NOTHING
    name = str(dtype).removeprefix("torch.")
    key = kernel, name, shape_class(kernel, machine, **extents)
    table, entries = _table(machine)
    found = entries.get(key, NOTHING)
    if table is not None:
        where = str(table.path) if found else f"default: {table.path} has no such entry"
    else:
        where = f"default: no valid table {table_name()!r} in {measured.file_of(machine.name)}"
    _miss(machine, found, where, key)
    _seen[key] = where
    return found


def _miss(machine: Machine, found: Mapping[str, int], where: str, key: tuple[str, str, tuple[int, ...]]) -> None:
    """Warn once that a default is used; not under the interpreter, where speed does not matter."""
    if found or machine.clock == "host" or _told:
        return
    _told.append(where)
    say(
        f"kernels run in their default configuration, not a tuned one; the first is {described(*key)}: {where} "
        "(fusedtp.ops.launch.tuned.report() lists all; `fusedtp bench tune` tunes them)"
    )


def described(kernel: str, dtype: str, at: tuple[int, ...]) -> str:
    """One line that names an entry."""
    return f"{kernel} {dtype} " + " ".join(f"{axis} {n}" for axis, n in zip(KERNELS[kernel].axes, at, strict=True))


def report() -> list[str]:
    """This process's lookups and the source of their values, one per line."""
    return [f"{described(*key)}: {where}" for key, where in sorted(_seen.items())]


def summary() -> str:
    """One line about this process's lookups; "" if there were none."""
    if not _seen:
        return ""
    default = sum(where.startswith("default") for where in tuple(_seen.values()))
    counts = f"{len(_seen) - default} tuned, {default} default"
    return f"configurations of kernels so far: {counts} (fusedtp.ops.launch.tuned.report() lists them)"


def digest(machine: Machine) -> int:
    """Digest of the table in use for the signature of a fused call; 0 without a table."""
    if _tried or not machine.name:
        return 0
    table = _table(machine)[0]
    return 0 if table is None else table.digest


def remembered(function: Callable[..., Config]) -> Callable[..., Config]:
    """Cache a function that chooses a configuration, until tables or held values change."""
    kept = lru_cache(4096)(function)
    _remembered.append(kept.cache_clear)
    return kept


def hold(kernel: str, values: Mapping[str, int] | None) -> None:
    """From now on launch this kernel with these values ({}: the default), overriding tables; None: stop doing so.

    For a tuner. All ranks must do this in the same way, between calls.
    """
    _forget_remembered()
    if values is None:
        _tried.pop(kernel, None)
    else:
        _tried[kernel] = dict(values)
    renew()


def forget() -> None:
    """Reload tables at the next call."""
    measured.forget()
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


@cache
def table_name() -> str:
    """The table's name, one per Triton version: another compiler may need more shared memory than the GPU has."""
    import triton

    return f"triton-{'.'.join(triton.__version__.split('.')[:2])}"


Entries = dict[tuple[str, str, tuple[int, ...]], Mapping[str, int]]


@cache
def _table(machine: Machine) -> tuple[Table | None, Entries]:
    return _read(machine.name, machine.clock, machine.shared_bytes, machine.capability)


@cache
def _read(name: str, clock: str, shared_bytes: int, capability: int) -> tuple[Table | None, Entries]:
    """Read the table once per GPU, however many ranks share it."""
    machine = Machine(clock, 0, shared_bytes, name=name, capability=capability)
    table = measured.read(table_name(), name, lambda entry: faults(entry, machine))
    return table, {} if table is None else {key_of(entry): entry["config"] for entry in table.entries}
