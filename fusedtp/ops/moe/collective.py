"""Rows to the experts' owners and back by the process group's all_to_all: between hosts, and where nothing else runs.

The host reads how many rows go where, which on a GPU waits for the device.
"""

from __future__ import annotations

from torch import Tensor

from fusedtp.comm import Communicator

from .plan import Blocks, Exchange, Plan


def move(
    comm: Communicator, x: Tensor, scalars: Tensor | None, plan: Plan, at: Exchange
) -> tuple[Tensor, Tensor]:
    """x [T_r, K], scalars [T_r, k] of the slots -> rows [max_rows, K] and the scalars of each [max_rows], else [0].

    Slots travel in their source's order, which is by owner; blocks are then put where they belong.
    """
    blocks = Blocks(plan.table, at)
    blocks.check_room(at)
    sent, received = blocks.lengths[at.rank], blocks.received
    slots = plan.orders[at.slots_of(at.rank)][: sum(sent)]
    payloads = [(x.new_empty(at.max_rows, x.shape[1]), x.index_select(0, slots // at.top_k))]
    if scalars is not None:
        payloads.append((scalars.new_empty(at.max_rows), scalars.reshape(-1).index_select(0, slots)))
    signature = at.signature(
        "moe_move", "collective", x.dtype, x.shape[1], with_bias=int(scalars is not None)
    )
    with comm.agreed(signature):
        for out, payload in payloads:
            arrived = comm.all_to_all(payload, sent, received)
            parts = arrived.split(received)
            for source, row, slot, n in blocks.each:
                begin = slot - blocks.begins[source]
                out[row : row + n] = parts[source][begin : begin + n]
    return payloads[0][0], payloads[1][0] if scalars is not None else x.new_empty(0)


def pull(comm: Communicator, rows: Tensor, plan: Plan, at: Exchange) -> Tensor:
    """rows [max_rows, N] of every owner -> [T_r * k, N] of this rank's slots in its order; dropped ones are zero."""
    blocks, width = Blocks(plan.table, at), rows.shape[1]
    back, received = blocks.lengths[at.rank], blocks.received
    payload = rows.new_empty(sum(received), width)
    parts = payload.split(received)
    for source, row, slot, n in blocks.each:
        begin = slot - blocks.begins[source]
        parts[source][begin : begin + n] = rows[row : row + n]
    out = rows.new_empty(at.tokens * at.top_k, width)
    out[sum(back) :].zero_()
    with comm.agreed(at.signature("moe_pull", "collective", rows.dtype, width)):
        out[: sum(back)] = comm.all_to_all(payload, received, back)
    return out
