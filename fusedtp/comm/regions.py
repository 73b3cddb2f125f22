"""The memory of a workspace: where things lie in its regions, as tensors, as arrays and as a kernel's addresses.

What each part is for stands in workspace.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from . import semaphore
from .device_view import DeviceView
from .memory import Region
from .signature import NUM_WORDS
from .streams import finish

if TYPE_CHECKING:
    from .communicator import Communicator

FLAGS_PER_SOURCE = 4096
MAX_VIEWS = 1024  # kept


class Regions:
    """The control region, which lasts, and the data region, which is replaced when it grows."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        w, device = comm.world_size, comm.device
        self._records_at = w * semaphore.SIZE
        self._flags_at = self._records_at + 2 * w * NUM_WORDS * 8
        self._sigs_at = self._flags_at + w * FLAGS_PER_SOURCE * 4
        self._gone_at = self._sigs_at + 2 * w * 4
        self.control = comm.world.allocate(self._gone_at + w * 4)
        self.data: Region | None = None
        self.slot_bytes = 0
        self._views: dict[tuple[int, int, tuple[int, ...], torch.dtype, int], Tensor] = {}
        self._flag_views: dict[tuple[int, int], Tensor] = {}
        self._view: DeviceView | None = None
        self._link: int | None = None
        self.epoch = torch.zeros(1, dtype=torch.int32, device=device)
        self._epoch: Any = self.epoch.numpy() if device.type == "cpu" else None
        self.status = torch.zeros(8, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._status: Any = self.status.numpy()
        self.failure = (
            torch.zeros(8, dtype=torch.int64, device=device) if device.type == "cuda" else self.status
        )
        if device.type == "cpu":
            own = self.control.addresses[comm.rank]
            for source in range(w):
                semaphore.init(own + source * semaphore.SIZE)
            self._records = [self._array(p, self._records_at, np.int64, (2, w, NUM_WORDS)) for p in range(w)]
            self._flags = [self._array(p, self._flags_at, np.int32, (w, FLAGS_PER_SOURCE)) for p in range(w)]
            self._sigs = [self._array(p, self._sigs_at, np.int32, (2, w)) for p in range(w)]
            self._gone = [self._array(p, self._gone_at, np.int32, (w,)) for p in range(w)]
        else:
            self.control.buffers[comm.rank].zero_()
            finish(device)  # before a peer's first signal

    def _array(self, p: int, offset: int, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        return np.frombuffer(self.control.buffers[p].numpy(), dtype, count, offset).reshape(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of symmetric memory this rank holds: control and both data slots."""
        return self.control.nbytes + (self.data.nbytes if self.data else 0)

    def view_of(self, p: int, parity: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int) -> Tensor:
        """Rank p's slot of that parity as a tensor; kept, since making it takes as long as a signal."""
        n = math.prod(shape) * dtype.itemsize
        if n == 0:  # there may be no data region yet
            return torch.empty(shape, dtype=dtype, device=self.comm.device)
        assert self.data is not None and offset + n <= self.slot_bytes, (shape, offset, self.slot_bytes)
        start = parity * self.slot_bytes + offset
        if len(self._views) > MAX_VIEWS:
            self._views.clear()
        view = self.data.buffers[p][start : start + n].view(dtype).view(shape)
        self._views[p, parity, shape, dtype, offset] = view
        return view

    def slot(self, p: int, parity: int) -> Tensor:
        """All bytes of rank p's slot of that parity."""
        return self.view_of(p, parity, (self.slot_bytes,), torch.uint8, 0)

    def flags_at(self, p: int, source: int) -> Tensor:
        """int32 [FLAGS_PER_SOURCE]: the flags in rank p's memory that `source` sets; kept, as the region lasts."""
        found = self._flag_views.get((p, source))
        if found is None:
            size = 4 * FLAGS_PER_SOURCE
            begin = self._flags_at + source * size
            found = self.control.buffers[p][begin : begin + size].view(torch.int32)
            self._flag_views[p, source] = found
        return found

    def poison(self) -> None:
        """Fill this rank's data slots with NaN (every byte 0xFF), for tests."""
        if self.data is None:
            return
        finish(self.comm.device)
        self.data.buffers[self.comm.rank].fill_(0xFF)
        finish(self.comm.device)

    def device_view(self, nbytes: int) -> DeviceView:
        """Inside a call that declared at least `nbytes`: the addresses for a kernel."""
        assert nbytes <= self.slot_bytes or nbytes == 0, (nbytes, self.slot_bytes)
        if self._view is None:
            device, control = self.comm.device, self.control.addresses
            table = lambda at: torch.tensor([a + at for a in control], dtype=torch.int64, device=device)  # noqa: E731
            data = self.data.addresses if self.data else control
            self._view = DeviceView(
                data_ptrs=torch.tensor(data, dtype=torch.int64, device=device),
                flag_ptrs=table(self._flags_at),
                sig_ptrs=table(self._sigs_at),
                epoch=self.epoch,
                status=self.status,
                failure=self.failure,
                slot_bytes=self.slot_bytes,
                flags_per_source=FLAGS_PER_SOURCE,
                timeout_s=self.comm.timeout_s,
                link=self._link,
                ranks_per_device=self.comm.world.ranks_per_device,
                meet=self.comm.world.barrier
                if self.comm.world.shares_process and device.type == "cuda"
                else None,
            )
        return self._view

    def set_timeout(self, seconds: float) -> None:
        """Bound the waits of later launches."""
        if self._view is not None:
            self._view = replace(self._view, timeout_s=seconds)

    def hold_link(self, rate: float | None) -> None:
        """Hold what this rank's kernels move to so many bytes a second in later launches; None: no longer.

        See Note [A held link] in kernels/signals.py. Copies are not held, which no kernel makes.
        """
        self._link = None if rate is None else math.ceil(1e15 / rate)
        if self._view is not None:
            self._view = replace(self._view, link=self._link)

    def carried(self) -> int:
        """Bytes that a held link of this rank has carried; waits for the device."""
        from fusedtp.kernels.signals import LINK_BYTES

        return int(self.failure[LINK_BYTES.value])
