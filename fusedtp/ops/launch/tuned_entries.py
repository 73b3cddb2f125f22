"""Entries of a table of tuned configurations: which there may be, and what is wrong with one. See tuned.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from fusedtp.ops.measured import Faults, wrong_number

from .config import Config, Machine

NEEDED = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
TILE = (*NEEDED, "group", "part", "max_registers")
SPLIT = ("chunk", "send_programs", "other_programs")
SWITCHES = ("tma", "specialized", "halves")  # 0 or 1
LIMITS = {  # least, most, a power of two
    "block_m": (16, 256, True),
    "block_n": (16, 256, True),
    "block_k": (16, 256, True),
    "num_warps": (1, 16, True),
    "num_stages": (1, 8, False),
    "group": (1, 64, False),
    "part": (32, 4096, True),
    "max_registers": (0, 255, False),
    "tma": (0, 1, False),
    "specialized": (0, 1, False),
    "halves": (0, 1, False),
    "chunk": (1, 1 << 16, False),
    "send_programs": (1, 4096, False),
    "other_programs": (1, 4096, False),
}
EXACT = ("even", "world", "programs")
REGISTERS = 1 << 16  # of a multiprocessor


class Kernel(NamedTuple):
    """What the class of a kernel's entries is made of, and which fields they set."""

    axes: tuple[str, ...]
    sets: tuple[str, ...]


_SCATTER = Kernel(("rows", "cols", "even", "world", "programs"), (*TILE, "tma", *SPLIT))
_GATHER = Kernel(("rows", "cols", "k", "even", "world", "programs"), (*TILE, "tma"))
KERNELS = {
    "matmul": Kernel(("rows", "cols", "k", "even", "programs"), (*TILE, *SWITCHES)),
    "all_gather_matmul": _GATHER,
    "all_gather_wgrad": _GATHER,
    "all_gather": Kernel(("rows", "k", "world", "programs"), ("chunk", "send_programs")),
    "matmul_reduce_scatter": _SCATTER,
    "one_shot": _SCATTER,
    "two_shot": _SCATTER,
}
DTYPES = ("float32", "float16", "bfloat16")


def key_of(entry: dict[str, Any]) -> tuple[str, str, tuple[int, ...]]:
    """What an entry of a table is for."""
    axes = KERNELS[entry["kernel"]].axes
    return entry["kernel"], entry["dtype"], tuple(entry["class"][axis] for axis in axes)


def faults(entry: dict[str, Any], machine: Machine) -> Faults:
    """What is wrong with one entry {"kernel", "dtype", "class", "config"} of a table of this kind of machine."""
    if not (isinstance(entry.get("kernel"), str) and entry["kernel"] in KERNELS):
        return [f"field 'kernel' is {entry.get('kernel')!r}; known are {', '.join(KERNELS)}"]
    kernel, found = KERNELS[entry["kernel"]], []
    if entry.get("dtype") not in DTYPES:
        found.append(f"field 'dtype' is {entry.get('dtype')!r}; known are {', '.join(DTYPES)}")
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
    """What makes values impossible for a kernel on this machine. Bytes and registers are lower bounds."""
    found = [f"{name} is no field of this kernel" for name in values if name not in kernel.sets]
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
        found.append(f"num_stages {stages} keeps {shared} bytes of shared memory, of {most}")
    lanes = 32 * values["num_warps"]
    registers = values.get("max_registers", 0)
    if machine.clock == "cuda" and lanes * max(registers, m * n // lanes) > REGISTERS:
        found.append(
            f"max_registers {registers}: {lanes} threads with a tile of {m} x {n} have {REGISTERS} registers"
        )
    if machine.clock != "cuda" and registers:
        found.append(f"max_registers {registers} is an option of CUDA only")
    if machine.clock == "cuda" and 0 < registers < 32:
        found.append(f"max_registers {registers} is too few to run")
    return [*found, *_switch_faults(values, dtype, machine)]


def _switch_faults(values: Mapping[str, Any], dtype: str, machine: Machine) -> Faults:
    """What is switched on that this machine, or this dtype, has not."""
    found = []
    if values.get("tma") and (machine.capability < 90 or dtype == "float32"):
        found.append(f"tma needs sm_90 or later and 16 bits; this is sm_{machine.capability}, {dtype}")
    if values.get("specialized"):
        if not values.get("tma") or machine.capability // 10 != 10:
            found.append(
                "specialized needs tma and sm_100: see Note [Warp specialisation] in kernels/matmul.py"
            )
        if values.get("max_registers"):
            found.append("max_registers is a limit of all warps alike, which those of specialized are not")
    return found


assert set(LIMITS) <= {field.name for field in fields(Config)}
