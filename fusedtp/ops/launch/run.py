"""Checks before a launch: tensors, slot bytes, and whether Triton can run here.

Modules that import triton are imported inside functions, so that `import fusedtp` works without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .config import Machine, machine_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST = 2**31 - 2**16  # rows or columns: kernels index them with 32 bits, up to a tile past the end; addresses have 64


def of_one_layout(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with equal strides, as kernels with two operands require; copied if strides differ."""
    if len({t.stride() for t in tensors}) == 1:
        return list(tensors)
    return [t.contiguous() for t in tensors]


def machine_for(view: Any, x: Tensor) -> Machine:
    return machine_of(x.device, view.ranks_per_device)


def check(
    view: Any,
    nbytes: int,
    x: Tensor,
    others: Sequence[Tensor | None],
    rows: int = 0,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Raise on user errors; assert the caller's invariants. rows: of all ranks, if x has only this rank's."""
    check_tensors(x, others, rows, dtypes)
    if view.epoch.device != x.device:
        raise ValueError(
            f"x is on {x.device}, but the group's memory is on {view.epoch.device}, the current device when the group "
            "was first used: call torch.cuda.set_device before that"
        )
    assert view.slot_bytes % 16 == 0 and nbytes <= view.slot_bytes, (nbytes, view.slot_bytes)


def check_tensors(
    x: Tensor, others: Sequence[Tensor | None], rows: int = 0, dtypes: Sequence[torch.dtype] = DTYPES
) -> None:
    """Raises if the kernels cannot run with these tensors here."""
    require_triton(x.device)
    longest = max(rows, *(n for t in (x, *others) if t is not None for n in t.shape))
    if longest > MOST:
        raise ValueError(f"the kernels take at most {MOST} rows or columns, not {longest}: use 'chunked'")
    if x.dtype not in dtypes:
        raise ValueError(f"the kernels compute in {', '.join(map(str, dtypes))}, not in {x.dtype}")
    for other in others:
        if other is not None and (other.dtype != x.dtype or other.device != x.device):
            raise ValueError(f"got {other.dtype} on {other.device} and {x.dtype} on {x.device}: they must match")


def require_triton(device: torch.device) -> None:
    """Raise RuntimeError with instructions if the kernels cannot run on `device`."""
    try:
        from fusedtp.kernels.tiles import INTERPRETED
    except ImportError as error:
        raise RuntimeError("engine='triton' needs the triton package, which cannot be imported here") from error
    if device.type == "cpu" and not INTERPRETED.value:
        raise RuntimeError(
            "engine='triton' runs on CPU tensors only under Triton's interpreter: set TRITON_INTERPRET=1 before "
            "triton is imported (kernels are decorated then), for example in the shell that starts python"
        )
