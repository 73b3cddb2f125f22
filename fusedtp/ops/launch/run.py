"""From checked tensors and a workspace's device view to a launch.

Everything that imports triton is imported inside a function: `import fusedtp` works without it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.copies import Sending
from fusedtp.comm.repeated import Repeated, on, start
from fusedtp.comm.streams import is_capturing

from .config import Config, Machine, machine_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST = (
    2**31 - 2**16
)  # rows or columns: kernels number them by 32 bits, a tile past the end; addresses have 64
_LOADING = threading.Lock()  # ranks that are threads: one compiles a kernel, the others find it


@dataclass(frozen=True)
class Launch:
    """A kernel with its arguments; `run` starts it on the current stream.

    A prepared launch lacks the arguments that change from call to call, its pointers; see `prepare` in the operations.
    """

    kernel: Any
    programs: int
    args: dict[str, Any]
    config: Config

    @cached_property
    def options(self) -> dict[str, int]:
        chosen = {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}
        if self.config.max_registers:  # an option that only the CUDA backend has
            chosen["maxnreg"] = self.config.max_registers
        return chosen

    @cached_property
    def repeated(self) -> Repeated:
        return Repeated(self.kernel, self.programs, self.args, self.options)

    def given(self, pointers: dict[str, Any]) -> Launch:
        """With the arguments that were missing."""
        return Launch(self.kernel, self.programs, {**self.args, **pointers}, self.config)

    def run(
        self,
        view: Any,
        device: torch.device,
        sending: Sending | None = None,
        pointers: dict[str, Any] | None = None,
    ) -> None:
        """Begin a call of the group and start. `sending`: copies beside the kernel, which then sends nothing.

        Ranks that share a GPU (their view has a `meet`, a barrier of the host threads) load the kernel before any of
        them starts it, and all start it before any goes on: what waits for the device, as loading a module or making a
        handle of the vendor's library can, would wait for a kernel that waits for a rank that cannot start its own.
        """
        given = {} if pointers is None else pointers
        peers = given.pop("peers", None)
        meet = None if view.meet is None or is_capturing() else view.meet
        with on(device):
            if meet is not None:
                with _LOADING:
                    view.bump.load()
                    self.repeated.load(given, peers)
                meet()
            view.bump.start(device)
            try:
                if sending is not None:
                    sending.send()
                if self.programs:
                    self.repeated.start(device, given, peers)
            finally:
                if sending is not None:
                    sending.join()
        if meet is not None:
            meet()

    def start(self, device: torch.device) -> None:
        """Start a kernel that belongs to no call, if there is anything to do."""
        if not self.programs:
            return
        with on(device):
            start(self.kernel, self.programs, self.args, self.options, device)


def layouts(*tensors: Tensor) -> tuple[Any, ...]:
    """Cache key of a prepared launch: shape, strides and alignment of each operand."""
    found = []
    for t in tensors:
        found.append((t.shape, t.stride(), t.data_ptr() % 16 == 0))
    return tuple(found)


def of_one_layout(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers with the same strides, as kernels want them of two; copied where they differ."""
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
    """What a user can get wrong raises; what the caller promised is asserted. rows: of all ranks, if x has its own."""
    check_tensors(x, others, rows, dtypes)
    assert view.slot_bytes % 16 == 0 and nbytes <= view.slot_bytes, (nbytes, view.slot_bytes)


def check_tensors(
    x: Tensor, others: Sequence[Tensor | None], rows: int = 0, dtypes: Sequence[torch.dtype] = DTYPES
) -> None:
    """Raises where these tensors cannot be computed with here."""
    require_triton(x.device)
    longest = max(rows, *(n for t in (x, *others) if t is not None for n in t.shape))
    if longest > MOST:
        raise ValueError(
            f"engine='triton' takes at most {MOST} rows or columns, not {longest}: use 'chunked'"
        )
    if x.dtype not in dtypes:
        raise ValueError(f"engine='triton' computes in {', '.join(map(str, dtypes))}, not in {x.dtype}")
    for other in others:
        if other is not None and (other.dtype != x.dtype or other.device != x.device):
            raise ValueError(
                f"got {other.dtype} on {other.device} beside {x.dtype} on {x.device}: one is wanted"
            )


def require_triton(device: torch.device) -> None:
    """Raise RuntimeError that says what to do where the kernels cannot run on `device`."""
    try:
        from fusedtp.kernels.tiles import INTERPRETED
    except ImportError as error:
        raise RuntimeError(
            "engine='triton' needs the triton package, which cannot be imported here"
        ) from error
    if device.type == "cpu" and not INTERPRETED.value:
        raise RuntimeError(
            "engine='triton' runs on CPU tensors only under Triton's interpreter: set TRITON_INTERPRET=1 before "
            "triton is imported (kernels are decorated then), for example in the shell that starts python"
        )
