"""The simulated world of a group: what a fused kernel sees of its peers, as plain tensors of one process."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedtp.comm.workspace import DeviceView
from fusedtp.ops.launch import Launch as Planned

from .case import Launch
from .memory import Memory, symmetric


class SimulatedWorld:
    """A workspace of W ranks: two rotating slots (poisoned), flags, signatures, epochs.

    slot_bytes         of one slot; every rank's data region holds two
    flags_per_source   chunks that one source can announce, chunk 0 being its arrival
    """

    def __init__(self, world_size: int, slot_bytes: int, flags_per_source: int) -> None:
        w = world_size
        self.world_size, self.slot_bytes, self.flags_per_source = (
            w,
            -(-slot_bytes // 16) * 16,
            flags_per_source,
        )
        self.data = symmetric("slots", w, (2, self.slot_bytes), torch.uint8)
        self.flags = symmetric("flags", w, (w, flags_per_source), torch.int32, poisoned=False)
        self.signatures = symmetric("signatures", w, (2, w), torch.int32, poisoned=False)
        self.epochs = symmetric("epoch", w, (1,), torch.int32, poisoned=False)
        self.failures = symmetric("failure", w, (8,), torch.int64, poisoned=False)
        self.statuses = symmetric("status", w, (8,), torch.int64, poisoned=False)

    @property
    def memory(self) -> tuple[Memory, ...]:
        return self.data, self.flags, self.signatures, self.epochs, self.failures, self.statuses

    def view(self, rank: int) -> DeviceView:
        """Rank's view, as ops/launch takes it. Its waits never time out: nobody waits in vain unnoticed here."""
        return DeviceView(
            data_ptrs=self.data.pointers,
            flag_ptrs=self.flags.pointers,
            sig_ptrs=self.signatures.pointers,
            epoch=self.epochs.tensors[rank],
            status=self.statuses.tensors[rank],
            failure=self.failures.tensors[rank],
            slot_bytes=self.slot_bytes,
            flags_per_source=self.flags_per_source,
            timeout_s=600.0,
        )

    def failed(self) -> list[Tensor]:
        """Status words of the ranks whose kernel recorded a failure."""
        return [status for status in self.statuses.tensors if int(status[0])]


def launches(planned: Planned, epoch: Tensor) -> list[Launch]:
    """A call as its rank's stream runs it: the epoch is bumped, then the fused kernel starts."""
    from fusedtp.kernels.signals import bump_epoch

    return [Launch(bump_epoch, 1, dict(epoch=epoch)), Launch(planned.kernel, planned.programs, planned.args)]
