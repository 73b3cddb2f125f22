"""The cost of flags and tile order: a fused kernel with all its data already there, against the plain matmul.

Launches one rank alone on the whole device. The data from its peers is already there, and the data that it sends goes
to local memory that is never read:

    flags         those of every peer are far ahead: each wait polls once and passes. Signatures agree
    gather        the other ranks' shards are in the slot, where peers would have pushed them; no program sends
    scatter       the other ranks' partials of the local rows are in the slot; the kernel still waits for its own
    fused         the kernel as started by every call of the library
    plain         kernels/matmul.py on the same rows, with the fused launch's tiles, warps and stages, by pointers, with
                  as many programs as multiply there; for a scatter, then torch's sum of the W parts of the local rows

So time(fused) / time(plain) is the cost of arrivals, polls, publishing, the order by shards, and counting. Neither uses
TMA, which the plain matmul uses by default on some GPUs: the suite `matmul` covers that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.device_view import DeviceView, epoch_words
from fusedtp.comm.workspace import FLAGS_PER_SOURCE
from fusedtp.ops.all_gather_matmul import plan_all_gather_matmul
from fusedtp.ops.launch import Launch, Machine, plain
from fusedtp.ops.launch.config import machine_of
from fusedtp.ops.matmul_reduce_scatter import plan_matmul_reduce_scatter
from fusedtp.ops.rows import Rows

Function = Callable[..., Tensor]
SIGNATURE = 1
AHEAD = 2**30  # an epoch that no run reaches
ALIGNED = 16  # alignment of every slot in bytes


@dataclass(frozen=True)
class Pair:
    """Two ways to do the same work on a rank's x and w; `holds` keeps their memory alive."""

    fused: Function
    plain: Function
    holds: Any


def view_of(rank: int, slots: list[int], device: torch.device, timeout_s: float = 600.0) -> tuple[DeviceView, Any]:
    """The view of `rank` on len(slots) ranks with slots at these addresses, everything published; and its memory.

    Both slots of a rank are the same: every call has the same data. The rank's own flags are behind, as in a call.
    """
    world_size = len(slots)
    flags = torch.full((world_size, world_size, FLAGS_PER_SOURCE), AHEAD, dtype=torch.int32, device=device)
    flags[rank, rank] = 0
    arrivals = torch.full((world_size, 2, world_size), SIGNATURE << 32 | AHEAD, dtype=torch.int64, device=device)
    status, failure = (torch.zeros(8, dtype=torch.int64, device=device) for _ in range(2))

    def table(addresses: list[int]) -> Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=device)

    view = DeviceView(
        data_ptrs=table(slots),
        flag_ptrs=table([part.data_ptr() for part in flags]),
        arrival_ptrs=table([part.data_ptr() for part in arrivals]),
        epoch=torch.tensor([1] + [0] * (epoch_words(world_size) - 1), dtype=torch.int32, device=device),
        status=status,
        failure=failure,
        slot_bytes=0,
        flags_per_source=FLAGS_PER_SOURCE,
        timeout_s=timeout_s,
    )
    return view, (flags, arrivals)


def _like(launch: Launch, programs: int, machine: Machine) -> Function:
    """x @ w.T by the plain kernel, with the tiles of `launch`."""
    part = replace(machine, programs=max(1, programs))

    def run(x: Tensor, w: Tensor) -> Tensor:
        multiply, y = plain.plan_matmul(x, w, None, x.dtype, launch.config, "ieee", part)
        multiply.start(x.device)
        return y

    return run


def gather(rank: int, rows: Rows, full: Tensor, w: Tensor) -> Pair:
    """all_gather_matmul of `rank`: (x [T_r, K], w [N, K]) -> [T, N], the other ranks' rows from full [T, K].

    w   has the shape of the w of later calls
    """
    world_size, machine = len(rows.sizes), machine_of(full.device)
    view, held = view_of(rank, [full.data_ptr()] * world_size, full.device)

    def plan(x: Tensor, w: Tensor) -> tuple[Launch, Tensor]:
        where = view, rank, world_size
        launch, outputs, _ = plan_all_gather_matmul(*where, x, [w], [None], rows, SIGNATURE, False, None, machine, True)
        return launch, outputs[0]

    def fused(x: Tensor, w: Tensor) -> Tensor:
        launch, y = plan(x, w)
        launch.run(view, x.device)
        return y

    launch, _ = plan(full[: rows.local(rank)], w)
    multiply = _like(launch, launch.programs, machine)
    return Pair(fused, lambda x, w: multiply(full, w), (full, held))


def scatter(rank: int, rows: Rows, parts: Tensor, x: Tensor, w: Tensor) -> Pair:
    """matmul_reduce_scatter of `rank`: (x [T, K], w [N, K]) -> its rows [R, N] of the sum.

    parts   [W, R, N] contiguous: every rank's partials of the local rows; each call overwrites its own
    x, w    have the shapes of those of later calls
    """
    world_size, machine = len(rows.sizes), machine_of(parts.device)
    each = rows.batch * max(rows.sizes) * w.shape[0] * parts.element_size()
    # The kernel writes only this rank's part of a peer's slot, so only that part is allocated.
    stride = -(-each // ALIGNED) * ALIGNED + 2 * ALIGNED
    elsewhere = torch.empty(world_size * stride, dtype=torch.uint8, device=parts.device)
    slots = []
    for owner in range(world_size):
        before = rank * rows.local(owner) * w.shape[0] * parts.element_size()
        begin = elsewhere.data_ptr() + owner * stride - before
        slots.append(-(-begin // ALIGNED) * ALIGNED)
    slots[rank] = parts.data_ptr()
    view, held = view_of(rank, slots, parts.device)

    def plan(x: Tensor, w: Tensor) -> tuple[Launch, Tensor]:
        return plan_matmul_reduce_scatter(view, rank, world_size, [x], [w], None, rows, SIGNATURE, None, machine)

    def fused(x: Tensor, w: Tensor) -> Tensor:
        launch, y = plan(x, w)
        launch.run(view, x.device)
        return y

    launch, _ = plan(x, w)
    multiply = _like(launch, launch.config.send_programs, machine)

    def unfused(x: Tensor, w: Tensor) -> Tensor:
        multiply(x, w)
        return parts.sum(0)

    return Pair(fused, unfused, (parts, elsewhere, held))
