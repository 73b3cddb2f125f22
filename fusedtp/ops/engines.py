"""Which engine runs an operation, and why.

The choice depends only on values that all ranks share: device, whether the group has a workspace, sizes, dtype, and the
table measured on this machine (measured.py).

Note [Facts of a rank]
Tables and kinds of GPUs may differ between ranks. Then `auto` could choose `collective` on one rank and `triton` on
another, and both would wait for the timeout: plain collectives compare signatures only in a group's first calls. So
ranks exchange these facts when their group is made, together with other things, and `auto` raises on all ranks, for any
size, if a fact that it depends on differs. It could take rank 0's table instead. But a rank without the user's table is
a mistake that should be known, fused calls need the same tuned configurations anyway, and ranks with other GPUs have no
table that is right for both. An engine that is asked for by name depends on none of these facts.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import NamedTuple

import torch

from fusedtp.comm import Communicator
from fusedtp.comm.communicator import RANK_FACTS, Facts
from fusedtp.comm.process_world import OVERLAPPING
from fusedtp.comm.signature import OF_KERNELS

from . import measured
from .measured import kind_of
from .rows import Rows

ENGINES = ("auto", "collective", "chunked", "triton", "multimem")
SWITCHED: list[str] = []  # operations that have an engine "multimem"; each registers itself
TABLE, KERNELS, FP8 = "the table of engines", "Triton kernels", "fp8 kernels"  # facts of a rank
BY_COPY = "triton-copy"  # the fused gather through the copy engine (not for few rows), whatever a table says

_HIDES = (
    f": {OVERLAPPING} is 1, which ranks need that see one GPU each; let every rank see all GPUs of its group (no "
    "CUDA_VISIBLE_DEVICES per rank, but torch.cuda.set_device), or "
)

# Below this many rows a GPU spends more time on flags than it hides, unless a crossover table measured on the machine
# says otherwise (kraken's reduce-scatter loses to NCCL at 512 rows and wins from 2048 on).
DEFAULT_CROSSOVER_ROWS = 2048


class Choice(NamedTuple):
    """transport: how a fused gather moves rows, by "programs" of its kernel or by "copy", the copy engine."""

    engine: str
    reason: str
    transport: str = "programs"


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def facts(device: torch.device) -> Facts:
    """What `auto` depends on that ranks may not share: Note [Facts of a rank]."""
    found: Facts = {TABLE: measured.source(kind_of(device))}
    if device.type == "cuda" and torch.version.hip:
        kind = torch.cuda.get_device_properties(device).gcnArchName
        found |= {KERNELS: (has_triton(), _of_triton()), FP8: (kind, kind)}
    elif device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        said = f"compute capability {capability[0]}.{capability[1]}"
        found |= {
            KERNELS: ((has_triton(), capability >= (8, 0)), f"{said} {_of_triton()}"),
            FP8: (capability >= (8, 9), said),
        }
    return found


def _of_triton() -> str:
    return "with Triton" if has_triton() else "without Triton"


RANK_FACTS.append(facts)


def check_alike(comm: Communicator, *names: str) -> None:
    """Raises ValueError, on all ranks, if one of these facts differs between ranks."""
    for name in names:
        if name in comm.differences:
            hint = f"set {measured.ENVIRONMENT} to the same folder on all ranks, or " if name == TABLE else ""
            raise ValueError(
                f"engine 'auto' depends on {name}, which ranks of group {comm.name!r} must share: "
                f"{comm.differences[name]}; {hint}name an engine, such as 'collective'"
            )


def choose(
    comm: Communicator,
    engine: str,
    rows: Rows,
    dtype: torch.dtype,
    operation: str = "",
    width: int = 0,
) -> Choice:
    """The engine for one call. Raises ValueError if the requested engine cannot run it; `auto` raises only if ranks
    differ in what it depends on.

    operation, width   keys of the crossover table; width is K of a gather, N of a reduction. Without: the defaults
    """
    if engine == BY_COPY:
        return choose(comm, "triton", rows, dtype, operation, width)._replace(transport="copy")
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
    if comm.world_size == 1:
        return Choice("local", "a group of one rank has nothing to communicate")
    if not comm.has_workspace:
        reason = f"no shared memory: {comm.fallback}"
        if engine not in ("auto", "collective"):
            warnings.warn(f"engine {engine!r} falls back to 'collective': {reason}", stacklevel=4)
        return Choice("collective", reason)
    if engine in OF_KERNELS:
        check_triton(comm, dtype, engine)
    if engine == "multimem" and operation not in SWITCHED:  # a model may request it for all of its operations
        engine = "triton"
    if engine == "multimem" and not comm.world.shares_process and comm.device.type == "cuda" and not comm.has_switch:
        why = _HIDES if os.environ.get(OVERLAPPING) == "1" else "; "
        raise ValueError(
            "engine 'multimem' needs GPUs of compute capability 9.0 or later and an NVSwitch with NVLink SHARP, but "
            f"torch's symmetric memory has no multicast address here{why}use 'triton'"
        )
    if engine != "auto":
        return Choice(engine, "asked for", _measured(comm, rows, dtype, operation, width).transport)
    if operation:
        check_alike(comm, TABLE, KERNELS)
    found = _measured(comm, rows, dtype, operation, width)
    default = _default(comm, rows, dtype, found.reason)
    if not found.engine or (found.engine == "triton" and default.engine == "chunked"):
        return default
    return Choice(found.engine, found.reason, found.transport)


def _measured(comm: Communicator, rows: Rows, dtype: torch.dtype, operation: str, width: int) -> measured.Found:
    """Look the call up in this machine's table."""
    if not operation:
        return measured.NOTHING
    ranks = "virtual" if comm.world.shares_process else "processes"
    at = measured.Key(operation, str(dtype).removeprefix("torch."), comm.world_size, ranks)
    return measured.find(kind_of(comm.device), at, rows.total, width)


def _default(comm: Communicator, rows: Rows, dtype: torch.dtype, why: str) -> Choice:
    """The engine where no table applies."""
    if comm.device.type == "cpu":
        return Choice("chunked", "CPU ranks read their peers' shards in place")
    if not has_triton():
        return Choice("chunked", "Triton is not installed")
    if torch.version.cuda and torch.cuda.get_device_capability(comm.device) < (8, 0):
        return Choice("chunked", "the Triton kernels need compute capability 8.0 or later")
    if dtype == torch.float64:
        return Choice("chunked", "the Triton kernels do not support fp64")
    if rows.total < DEFAULT_CROSSOVER_ROWS:
        return Choice("collective", f"{rows.total} rows, fewer than {DEFAULT_CROSSOVER_ROWS} ({why})")
    return Choice("triton", f"{rows.total} rows, at least {DEFAULT_CROSSOVER_ROWS} ({why})")


def tables(comm: Communicator, engine: str) -> int:
    """For the signature of a call: this rank's tuned table and its number of programs, which determine its launches."""
    if engine not in OF_KERNELS:
        return 0
    from .launch import tuned
    from .launch.config import machine_of

    machine = machine_of(comm.device)
    return machine.programs << 32 | tuned.digest(machine) & 0xFFFFFFFF


def choose_mover(comm: Communicator, rows: Rows, dtype: torch.dtype) -> Choice:
    """For an operation without a matmul, which has no fused kernel: on CUDA the process group's collectives run."""
    choice = choose(comm, "auto", rows, dtype)
    if choice.engine == "local" or (choice.engine == "chunked" and comm.device.type == "cpu"):
        return choice
    return Choice("collective", choice.reason)


def check_triton(comm: Communicator, dtype: torch.dtype, engine: str = "triton") -> None:
    """Raise ValueError if the requested kernel engine is unavailable."""
    if not has_triton():
        raise ValueError(f"engine {engine!r} needs the triton package")
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"engine {engine!r} takes fp32, fp16 and bf16, not {dtype}; use 'chunked' or 'collective'")
    if comm.device.type == "cpu" and not interpreting():
        raise ValueError(
            f"engine {engine!r} on CPU tensors runs in Triton's interpreter: set TRITON_INTERPRET=1 in the environment "
            "before Python starts, or use 'chunked'"
        )
    if comm.device.type == "cpu" and comm.world.shares_process:
        raise ValueError(
            f"engine {engine!r} cannot run in a virtual world on CPU: Triton's interpreter runs one rank per process; "
            "use 'chunked'"
        )


def calls(comm: Communicator) -> dict[str, dict[str, int]]:
    """operation -> {engine that actually ran: number of calls} in this rank's group since it was made."""
    return _nested(comm.engine_calls)


def layer_calls(comm: Communicator) -> dict[str, dict[str, int]]:
    """kind of layer -> {engine that actually ran: number of calls}, forward and backward.

    Calls that belong to no layer (the loss, gradients of replicated parameters) are listed under their operation.
    """
    return _nested(comm.layer_calls)


def _nested(counts: dict[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    out: dict[str, dict[str, int]] = {}
    for (key, engine), n in sorted(counts.items()):
        out.setdefault(key, {})[engine] = n
    return out
