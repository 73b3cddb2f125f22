"""Where a rank's time goes: one clock whose seconds are always booked under exactly one kind.

    with clocks("compute"):
        ...                          compute
        with clocks("dp_wait"):
            ...                      dp_wait; the compute around it stands still
        ...                          compute

Who communicates says so at seams that torch offers: FSDP2's custom communication and its hook after an all-reduce
(`time_fsdp`), the passes of a pipeline's stage (stages.py), a batch's reading (data.py). Waits inside fused operations
are counted by fusedtp.comm. On a GPU kernels wait, and a host's clock says nothing of it; there nothing is timed.

The kind on top, since when, and the last call say where a rank is right now; a thread reads them (pulse.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

# torch 2.13 renamed both and warns of the old names; 2.11 has only those.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OTHER, APART = "other", "apart"  # what nothing else claims; what belongs to no step


class Clocks:
    """Seconds by kind, so far. What happens under the kind "apart" stays there, whatever kinds are nested in it.

    seconds   kind -> seconds; a kind that never was on top is missing
    last      the last call that communicated, by name; calls: how many there were
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last, self.calls = "", 0
        self._kinds = [OTHER]
        self.since = time.perf_counter()

    @property
    def kind(self) -> str:
        """What this rank is at now."""
        return self._kinds[-1]

    @contextmanager
    def __call__(self, kind: str, call: str = "") -> Iterator[None]:
        """Book what happens within under a kind. call: name of what communicates."""
        self.enter(kind, call)
        try:
            yield
        finally:
            self.leave()

    def enter(self, kind: str, call: str = "") -> None:
        """The same, until `leave`."""
        self._book()
        self._kinds.append(APART if self.kind == APART else kind)
        if call:
            self.called(call)

    def leave(self) -> None:
        self._book()
        self._kinds.pop()

    def called(self, call: str) -> None:
        """Note what communicates next, or has just begun to."""
        self.last, self.calls = call, self.calls + 1

    def base(self, kind: str) -> None:
        """From now on, what no `with` claims is of this kind."""
        self._book()
        self._kinds[0] = kind

    def read(self) -> dict[str, float]:
        """The seconds of every kind up to now."""
        self._book()
        return dict(self.seconds)

    def _book(self) -> None:
        now = time.perf_counter()
        self.seconds[self.kind] = self.seconds.get(self.kind, 0.0) + now - self.since
        self.since = now


# -- FSDP2 -------------------------------------------------------------------------------------------------------------


class _Allocates:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TimedGather(_Allocates, AllGather):
    """The all-gather of FSDP2, timed."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks = clocks

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self.clocks("dp_wait", "FSDP's all_gather"):
            work = _gather_into(output_tensor, input_tensor, group=group, async_op=async_op)
        return work if work is None else _TimedWork(work, self.clocks)


class TimedScatter(_Allocates, ReduceScatter):
    """The reduce-scatter of FSDP2, timed; with `copies`, from there to `reduced`, which follows its all-reduce.

    FSDP2 allocates what it sends, then what it receives. Communication follows the latter.
    """

    def __init__(self, clocks: Clocks, copies: bool) -> None:
        self.clocks, self.copies, self._allocated = clocks, copies, 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._allocated += 1
        if self.copies and self._allocated == 2:
            self.clocks.enter("dp_wait", "FSDP's all_reduce")
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self.clocks("dp_wait", "FSDP's reduce_scatter"):
            return _reduce_scatter_into(output_tensor, input_tensor, group=group, op=op, async_op=async_op)

    def reduced(self, gradient: Tensor) -> None:
        """The hook after an all-reduce."""
        self.clocks.leave()
        self._allocated = 0


class _TimedWork(dist.Work):
    """A gather on its way, whose `wait` is timed."""

    def __init__(self, work: dist.Work, clocks: Clocks) -> None:
        super().__init__()
        self.work, self.clocks = work, clocks

    def wait(self, *timeout: Any) -> bool:
        with self.clocks("dp_wait"):
            return self.work.wait(*timeout)


def time_fsdp(model: nn.Module, clocks: Clocks, copies: bool) -> None:
    """Have FSDP2's communication timed, where ranks wait for it on the host. copies: whether shards have copies."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            scatter = TimedScatter(clocks, copies)
            module.set_custom_all_gather(TimedGather(clocks))
            module.set_custom_reduce_scatter(scatter)
            if copies:
                module.set_all_reduce_hook(scatter.reduced)
