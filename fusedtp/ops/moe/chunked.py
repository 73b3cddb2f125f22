"""Rows to the experts' owners and back over the workspace, on CPU: owners read in their peers' memory.

    move   rank r       copy x to slot | publish | own rows | wait r+1 | its rows for my experts | wait r+2 | ...
    collect rank r      copy the peers' rows to slot | publish | wait r+1 | wait r+2 | ... | rows from everywhere
    multiply_and_collect      multiply into slot     | publish | wait r+1 | wait r+2 | ... | rows from everywhere

Tokens are published, not their k copies: an owner picks the rows that it wants. What is done with rows is done to some
at a time, while they are in the core's cache: brought, weighed, added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fusedtp.comm import Communicator, Signature

from ..local import ring
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
    rows = x.new_empty(at.max_rows, width)
    of_rows = x.new_empty(0) if scalars is None else scalars.new_empty(at.max_rows)

    def take(source: int, theirs: Tensor, their_scalars: Tensor | None) -> None:
        begin, end = blocks.spans[at.rank, source]
        slots = plan.orders[at.slots_of(source)][begin:end]
        tokens = slots // at.top_k
        for row, slot, n in blocks.between(at.rank, source):
            here = slice(slot - begin, slot - begin + n)
            for some in weigh.stretches(n, width, x.dtype, x.device):
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


def move_matmul(
    comm: Communicator,
    x: Tensor,
    scalars: Tensor | None,
    weights: Sequence[Tensor],
    offsets: Tensor,
    act: str,
    keep: bool,
    plan: Plan,
    at: Exchange,
) -> list[Tensor]:
    """As `move_matmul` of fused.py: rows and what their experts make of them."""
    moved = move(comm, x, scalars, plan, at)
    if act:
        gate, up = weights
        return [*moved, *grouped_engines.gated("chunked", moved[0], gate, up, offsets, act, keep)]
    return [*moved, grouped_engines.matmul("chunked", moved[:1], weights, offsets, None)]


def collect(
    comm: Communicator, y: Tensor, choices: Tensor, weights: Tensor | None, plan: Plan, at: Exchange
) -> Tensor:
    """y [max_rows, N] of every owner, choices [T, k'] (places in this rank's order) -> [T, N], their weighted sums."""
    signature = at.signature("moe_pull", "chunked", y.dtype, y.shape[1])

    def publish(slot: Tensor, blocks: Blocks) -> Tensor:
        for some in blocks.of_peers(at.rank):
            slot[some].copy_(y[some])
        return y

    return _collected(comm, y.dtype, y.shape[1], publish, choices, weights, signature, plan, at)


def multiply_and_collect(
    comm: Communicator,
    hs: Sequence[Tensor],
    experts: Sequence[Tensor],
    offsets: Tensor,
    choices: Tensor,
    weights: Tensor | None,
    plan: Plan,
    at: Exchange,
    precision: str,
) -> Tensor:
    """As `collect` of sum_j hs[j] @ experts[j][e].T, hs[j] [max_rows, K], experts[j] [E_r, N, K]."""
    dtype, width = hs[0].dtype, experts[0].shape[1]
    signature = at.signature("moe_matmul_pull", "chunked", dtype, width, batch=len(hs))

    def publish(slot: Tensor, blocks: Blocks) -> Tensor:
        y = slot[: hs[0].shape[0]]
        grouped_engines.matmul_into(y, hs, experts, offsets)
        return y

    return _collected(comm, dtype, width, publish, choices, weights, signature, plan, at)


def _collected(
    comm: Communicator,
    dtype: torch.dtype,
    width: int,
    publish: Callable[[Tensor, Blocks], Tensor],
    choices: Tensor,
    weights: Tensor | None,
    signature: Signature,
    plan: Plan,
    at: Exchange,
) -> Tensor:
    """[T, width]: the sums of rows of which `publish` puts the peers' into this rank's slot. It returns its own."""
    blocks, a_row = Blocks(plan.table, at), width * dtype.itemsize
    nbytes = _round_up(max(blocks.rows) * a_row)
    room = nbytes // a_row if a_row else max(blocks.rows)
    with comm.workspace.call(signature, nbytes) as call:
        owners = [call.buffer(p, (room, width), dtype) for p in range(at.world_size)]
        owners[at.rank] = publish(owners[at.rank], blocks)
        call.publish_all()
        rows = _Rows(blocks, choices, width, dtype, at)
        for p in ring(comm, own="first")[1:]:
            with comm.span(f"wait {p}"):
                call.wait(p)
        return rows.summed(owners, weights)


class _Rows:
    """Where the rows of a rank's choices lie, by stretches of tokens; in a stretch by owner, the dropped ones last.

    A stretch's rows are brought into a buffer that the core's cache holds, and are added up from there.
    """

    def __init__(self, blocks: Blocks, choices: Tensor, width: int, dtype: torch.dtype, at: Exchange) -> None:
        (self.tokens, self.k), self.width, self.dtype = choices.shape, width, dtype
        self.wide, owners = weigh.accumulator(dtype), at.world_size
        self.stretches = list(weigh.stretches(self.tokens, self.k * width, self.wide, choices.device))
        each = self.stretches[0].stop if self.stretches else 1
        rows, owner = blocks.sought(at.rank, self.tokens * self.k)
        slots = choices.reshape(-1)
        stretch = torch.arange(len(slots)) // (self.k * each)
        kind = stretch * (owners + 1) + owner[slots]
        by_kind = kind.argsort(stable=True)
        self.rows = rows[slots[by_kind]]
        self.counts = torch.bincount(kind, minlength=len(self.stretches) * (owners + 1)).tolist()
        self.places = (weigh.places_of(by_kind) - stretch * (self.k * each)).view(choices.shape)

    def summed(self, owners: Sequence[Tensor], weights: Tensor | None) -> Tensor:
        """The rows of `owners` -> [T, N]."""
        out = owners[0].new_empty(self.tokens, self.width)
        buffer = out.new_empty(self.k * (self.stretches[0].stop if self.stretches else 0), self.width)
        if weights is not None:
            weights = weights.to(self.wide)
        counts, begin = iter(self.counts), 0
        for some in self.stretches:
            filled = 0
            for theirs in owners:
                n = next(counts)
                torch.index_select(theirs, 0, self.rows[begin : begin + n], out=buffer[filled : filled + n])
                begin, filled = begin + n, filled + n
            n = next(counts)
            buffer[filled : filled + n].zero_()
            begin += n
            weigh.sum_into(out[some], buffer, self.places[some], None if weights is None else weights[some])
        return out


def _round_up(nbytes: int) -> int:
    """To a power of two, so that batches of other routing do not each grow the workspace."""
    return max(16, 1 << (nbytes - 1).bit_length())
