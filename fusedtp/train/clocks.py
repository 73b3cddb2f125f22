"""Where a rank's time goes: a clock that books every second under exactly one kind.

    with clocks("compute"):
        ...                          compute
        with clocks("dp_wait"):
            ...                      dp_wait; the surrounding compute is paused
        ...                          compute

Communication is timed at extension points of torch: FSDP2's custom communication and its all-reduce hook (`time_fsdp`),
the passes of a pipeline stage (stages.py) and the reading of batches (data.py). fusedtp.comm counts waits inside fused
operations. On GPU the kernels wait, which a host clock cannot see, so nothing is timed there.

The current kind, its start and the last call tell where a rank is right now; a thread reads them (pulse.py).
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

# torch 2.13 renamed both and warns about the old names; 2.11 has only the old names.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OTHER, APART = "other", "apart"  # time that no other kind claims; time outside of steps


class Clocks:
    """Seconds by kind, so far. Within the kind "apart", nested kinds are booked as "apart" too.

    seconds   kind -> seconds; a kind that was never current is missing
    last      name of the last call that communicated; calls: number of such calls
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last, self.calls = "", 0
        self._kinds = [OTHER]
        self.since = time.perf_counter()

    @property
    def kind(self) -> str:
        """The current kind."""
        return self._kinds[-1]

    @contextmanager
    def __call__(self, kind: str, call: str = "") -> Iterator[None]:
        """Book the time within this context under a kind. call: name of the communication."""
        self.enter(kind, call)
        try:
            yield
        finally:
            self.leave()

    def enter(self, kind: str, call: str = "") -> None:
        """Start booking under a kind, until `leave`."""
        self._book()
        self._kinds.append(APART if self.kind == APART else kind)
        if call:
            self.called(call)

    def leave(self) -> None:
        self._book()
        self._kinds.pop()

    def called(self, call: str) -> None:
        """Record the name of a communication that starts now."""
        self.last, self.calls = call, self.calls + 1

    def base(self, kind: str) -> None:
        """From now on, book time outside of any `with` under this kind."""
        self._book()
        self._kinds[0] = kind

    def read(self) -> dict[str, float]:
        """Seconds of every kind up to now."""
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
    """The reduce-scatter of FSDP2, timed; with `copies` (HSDP), from there to `reduced`, which follows the all-reduce.

    FSDP2 allocates the send buffer, then the receive buffer. Communication starts after the second allocation.
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
        """Hook after an all-reduce."""
        self.clocks.leave()
        self._allocated = 0


class _TimedWork(dist.Work):
    """An asynchronous all-gather with a timed `wait`."""

    def __init__(self, work: dist.Work, clocks: Clocks) -> None:
        super().__init__()
        self.work, self.clocks = work, clocks

    def wait(self, *timeout: Any) -> bool:
        with self.clocks("dp_wait"):
            return self.work.wait(*timeout)


def time_fsdp(model: nn.Module, clocks: Clocks, copies: bool) -> None:
    """Time FSDP2's communication, on devices where the host waits for it. copies: whether shards have replicas."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            scatter = TimedScatter(clocks, copies)
            module.set_custom_all_gather(TimedGather(clocks))
            module.set_custom_reduce_scatter(scatter)
            if copies:
                module.set_all_reduce_hook(scatter.reduced)
