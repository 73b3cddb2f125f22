"""A fused gather whose rows travel by copies, as its rank's host enqueues it; see Note [Copies beside a kernel].

stream 0      bump_epoch | event 0 | the kernel, without senders             | event 1 awaited
stream copy                event 0 awaited | rows | flags | rows | ... | event 1
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedtp.comm.copies import Part, parts
from fusedtp.ops.launch import Launch as Planned
from fusedtp.ops.rows import Rows

from .case import Await, Copy, Signal, Work
from .worlds import SimulatedWorld, launches

STREAM = "copy"


def beside_copies(
    planned: Planned, world: SimulatedWorld, rank: int, rows: Rows, number: int, pieces: int = 3
) -> list[Work]:
    """The work of one call on `rank`. number: of this call, as the host counts."""
    bump, kernel = launches(planned, world.epochs.tensors[rank])
    forked, done = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    x, chunk = planned.args["x"], planned.args["chunk_rows"]
    work: list[Work] = [bump, Signal(forked, 1), Await(forked, 1, STREAM)]
    for part in parts(rank, world.world_size, x.shape[0], chunk, pieces):
        there = place_of(world, part, x, rows.batch * rows.offset(rank), number)
        if there.numel():
            work.append(Copy(there, x[part.first : part.last].view(-1), pieces=2, stream=STREAM))
        flags = world.flags.tensors[part.peer][rank]
        work += [Signal(flags[part.flag + i :][:1], number, STREAM) for i in range(part.flags)]
    return [*work, Signal(done, 1, STREAM), kernel, Await(done, 1)]


def place_of(world: SimulatedWorld, part: Part, x: Tensor, begin: int, number: int) -> Tensor:
    """Where a part's rows belong in its peer's slot: those of the shard that begins at row `begin` of [T, K]."""
    row = x.shape[1] * x.element_size()
    slot = world.data.tensors[part.peer][number & 1]
    return slot[(begin + part.first) * row : (begin + part.last) * row].view(x.dtype)
