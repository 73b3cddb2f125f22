"""Rows to the experts' owners and back over the workspace, on CPU: each rank reads and writes in its peers' memory.

    move     copy x to the own slot | publish | own rows | wait r+1 | its rows for my experts | wait r+2 | ...
    collect  rows of expert 0 to the slots of their tokens' ranks | of expert 1 | ... | publish | wait for all | sum

Tokens are published, not their k copies: an owner picks the rows that it wants. On their way back rows are pushed: an
expert's product goes where it belongs as long as it is in the core's cache, and a token's rows end in one place.

A compiled graph learns only here whether there is room for all rows: every rank looks, before it begins a call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fusedtp.comm import Communicator, Signature

from ..shards import ring
from . import grouped_engines, weigh
from .plan import Blocks, Exchange, Plan


def move(
    comm: Communicator,
    x: Tensor,
    scalars: Tensor | None,
    plan: Plan,
    at: Exchange,
    then: Callable[[Tensor, slice], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """x [T_r, K], scalars [T_r, k] of the slots -> rows [max_rows, K] and the scalars of each [max_rows], else [0].

    What lies past the owner's rows is undefined. `then` is called with the rows and which of them have come, as long
    as they are in the core's cache.
    """
    blocks, width = Blocks(plan.table, at), x.shape[1]
    blocks.check_room(at)
    rows = x.new_empty(at.max_rows, width)
    of_rows = x.new_empty(0) if scalars is None else scalars.new_empty(at.max_rows)

    def take(source: int, theirs: Tensor, their_scalars: Tensor | None) -> None:
        begin = blocks.begins[source]
        slots = plan.orders[at.slots_of(source)][begin : begin + blocks.received[source]]
        tokens = slots // at.top_k
        for _source, row, slot, n in blocks.of(source):
            here = slice(slot - begin, slot - begin + n)
            few = [slice(0, n)] if then is None else weigh.stretches(n, width, x.dtype, x.device)
            for some in few:
                arrived = slice(row + some.start, row + some.stop)
                torch.index_select(theirs, 0, tokens[here][some], out=rows[arrived])
                if then is not None:
                    then(rows, arrived)
            if their_scalars is not None:
                torch.index_select(their_scalars.view(-1), 0, slots[here], out=of_rows[row : row + n])

    most = max(at.sizes)
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


def collect(
    comm: Communicator, y: Tensor, choices: Tensor, weights: Tensor | None, plan: Plan, at: Exchange
) -> Tensor:
    """y [max_rows, N] of every owner, choices [T, k'] (places in this rank's order) -> [T, N], their weighted sums."""
    signature = at.signature("moe_pull", "chunked", y.dtype, y.shape[1])
    return _collected(comm, y.new_empty(0, y.shape[1]), [(0, y)], choices, weights, signature, plan, at)


def multiply_and_collect(
    comm: Communicator,
    hs: Sequence[Tensor],
    experts: Sequence[Tensor],
    offsets: Tensor,
    choices: Tensor,
    weights: Tensor | None,
    plan: Plan,
    at: Exchange,
) -> Tensor:
    """As `collect` of sum_j hs[j] @ experts[j][e].T, hs[j] [max_rows, K], experts[j] [E_r, N, K]."""
    nothing = hs[0].new_empty(0, experts[0].shape[1])
    signature = at.signature("moe_matmul_pull", "chunked", nothing.dtype, nothing.shape[1], batch=len(hs))
    made = grouped_engines.matmul_by_expert(hs, experts, offsets)
    return _collected(comm, nothing, made, choices, weights, signature, plan, at)


def _collected(
    comm: Communicator,
    nothing: Tensor,
    made: Iterable[tuple[int, Tensor]],
    choices: Tensor,
    weights: Tensor | None,
    signature: Signature,
    plan: Plan,
    at: Exchange,
) -> Tensor:
    """The sums, [T, N] like `nothing` [0, N]. `made` are this rank's rows, whole experts at a time, and their begin."""
    blocks, width = Blocks(plan.table, at), nothing.shape[1]
    blocks.check_room(at)
    slots = [n * at.top_k for n in at.sizes]
    nbytes = max(slots) * width * nothing.element_size()
    with comm.workspace.call(signature, nbytes) as call:
        parts = [call.buffer(p, (n, width), nothing.dtype) for p, n in enumerate(slots)]
        due = deque(blocks.each)
        for first, rows in made:
            while due and due[0].row < first + rows.shape[0]:
                source, row, slot, n = due.popleft()
                parts[source][slot : slot + n].copy_(rows[row - first : row - first + n])
        assert not due, due
        call.publish_all()
        mine = parts[at.rank]
        mine[blocks.sent[at.rank] :].zero_()
        for p in ring(comm, own="first")[1:]:
            with comm.span(f"wait {p}"):
                call.wait(p)
        return weigh.weighted_sum(mine, choices, weights)
