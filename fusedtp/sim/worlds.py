"""The simulated world of a group: what a fused kernel sees of its peers, as plain tensors of one process."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedtp.comm import DeviceView
from fusedtp.comm.device_view import peers_of
from fusedtp.ops.launch import Launch as Planned

from .case import Launch
from .memory import Memory, symmetric


class SimulatedWorld:
    """A workspace of W ranks: two rotating slots (poisoned), flags, signatures, epochs.

    slot_bytes         of one slot; every rank's data region holds two
    flags_per_source   chunks that one source can announce, chunk 0 being its arrival
    link               femtoseconds that a byte takes where links are held, see kernels/signals.py
    """

    def __init__(
        self, world_size: int, slot_bytes: int, flags_per_source: int, link: int | None = None
    ) -> None:
        w, self.link = world_size, link
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
            link=self.link,
        )

    def recorded(self) -> list[str]:
        """What each rank's kernels wrote down of a wait that failed, in words."""
        from fusedtp.kernels.signals import OTHER_SIGNATURE, TIMED_OUT

        meant = {TIMED_OUT.value: "a wait timed out", OTHER_SIGNATURE.value: "a peer is in another call"}
        found = []
        for rank, (failure, status) in enumerate(zip(self.failures.tensors, self.statuses.tensors)):
            if code := int(failure[0]):
                peer, index, wanted, seen = status[1:5].tolist()
                said = (
                    f"{meant.get(code, 'unknown')} (peer {peer}, flag {index}, wanted {wanted}, seen {seen})"
                )
                found.append(f"status of rank {rank} [0] says {code}: {said}")
        return found


def launches(planned: Planned, epoch: Tensor) -> list[Launch]:
    """A call as its rank's stream runs it: the epoch is bumped, then the fused kernel starts."""
    from fusedtp.kernels.signals import bump_epoch

    return [Launch(bump_epoch, 1, dict(epoch=epoch)), Launch(planned.kernel, planned.programs, planned.args)]


def meeting(world: SimulatedWorld, rank: int, signature: int) -> list[Launch]:
    """A meeting of all ranks as `rank`'s stream runs it."""
    from fusedtp.kernels.meet import meet_kernel
    from fusedtp.kernels.signals import bump_epoch

    peers = peers_of(world.view(rank), rank, world.world_size, signature, "host")
    return [
        Launch(bump_epoch, 1, dict(epoch=world.epochs.tensors[rank])),
        Launch(meet_kernel, 1, dict(peers=peers)),
    ]
