"""Rows to the experts' owners and back over the workspace, on CPU: owners read in their peers' memory.

    move   rank r       copy x to slot | publish | own rows | wait r+1 | its rows for my experts | wait r+2 | ...
    pull   rank r       copy rows to slot | publish | own rows | wait r+1 | its rows for my slots | wait r+2 | ...

Tokens are published, not their k copies: an owner picks the rows that it wants.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedtp.comm import Communicator

from ..local import ring
from .plan import Blocks, Exchange, Plan


def move(
    comm: Communicator, x: Tensor, scalars: Tensor | None, plan: Plan, at: Exchange
) -> tuple[Tensor, Tensor]:
    """x [T_r, K], scalars [T_r, k] of the slots -> rows [max_rows, K] and the scalars of each [max_rows], else [0].

    What lies past the owner's rows is undefined.
    """
    blocks = Blocks(plan.table, at)
    rows = x.new_empty(at.max_rows, x.shape[1])
    of_rows = x.new_empty(0) if scalars is None else scalars.new_empty(at.max_rows)

    def take(source: int, theirs: Tensor, their_scalars: Tensor | None) -> None:
        begin, end = blocks.spans[at.rank, source]
        slots = plan.orders[at.slots_of(source)][begin:end]
        tokens = slots // at.top_k
        for row, slot, n in blocks.between(at.rank, source):
            here = slice(slot - begin, slot - begin + n)
            torch.index_select(theirs, 0, tokens[here], out=rows[row : row + n])
            if their_scalars is not None:
                torch.index_select(their_scalars.view(-1), 0, slots[here], out=of_rows[row : row + n])

    most, width = max(at.sizes), x.shape[1]
    after = -(-most * width * x.element_size() // 16) * 16
    nbytes = after + (0 if scalars is None else most * at.top_k * scalars.element_size())
    signature = at.signature("moe_move", "chunked", x.dtype, width, with_bias=int(scalars is not None))
    with comm.workspace.call(signature, nbytes) as call:

        def shared(p: int) -> tuple[Tensor, Tensor | None]:
            tokens = call.buffer(p, (at.sizes[p], width), x.dtype)
            if scalars is None:
                return tokens, None
            return tokens, call.buffer(p, (at.sizes[p], at.top_k), scalars.dtype, after)

        for mine, given in zip(shared(at.rank), (x, scalars), strict=True):
            if mine is not None and given is not None:
                mine.copy_(given)
        call.publish_all()
        take(at.rank, x, None if scalars is None else scalars.contiguous())
        for p in ring(comm, own="first")[1:]:
            with comm.span(f"wait {p}"):
                call.wait(p)
            take(p, *shared(p))
    return rows, of_rows


def pull(comm: Communicator, rows: Tensor, plan: Plan, at: Exchange) -> Tensor:
    """rows [max_rows, N] of every owner -> [T_r * k, N] of this rank's slots in its order; dropped ones are zero."""
    blocks, width = Blocks(plan.table, at), rows.shape[1]
    out = rows.new_empty(at.tokens * at.top_k, width)
    out[blocks.sent[at.rank] :].zero_()

    def take(owner: int, theirs: Tensor) -> None:
        for row, slot, n in blocks.between(owner, at.rank):
            out[slot : slot + n].copy_(theirs[row : row + n])

    a_row, mine = width * rows.element_size(), blocks.rows[at.rank]
    nbytes = _round_up(max(blocks.rows) * a_row)
    room = nbytes // a_row if a_row else max(blocks.rows)
    with comm.workspace.call(at.signature("moe_pull", "chunked", rows.dtype, width), nbytes) as call:
        shared = [call.buffer(p, (room, width), rows.dtype) for p in range(at.world_size)]
        shared[at.rank][:mine].copy_(rows[:mine])
        call.publish_all()
        take(at.rank, rows)
        for p in ring(comm, own="first")[1:]:
            with comm.span(f"wait {p}"):
                call.wait(p)
            take(p, shared[p])
    return out


def _round_up(nbytes: int) -> int:
    """To a power of two, so that batches of other routing do not each grow the workspace."""
    return max(16, 1 << (nbytes - 1).bit_length())
