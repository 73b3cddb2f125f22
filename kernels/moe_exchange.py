"""Rows between the tokens' ranks and the experts' owners: dispatch and combine, one launch each.

    dispatch   x [T_r, K]        -> rows [max_rows, K] of this rank's experts
    combine    y [max_rows, N]   -> out [T_r, N], the weighted sum of each token's choices

In a dispatch, owners pull. Every rank publishes its x once, in its own slot, and sets one flag at every peer when all
of x is there. An owner reads the rows that it needs in place and stores each at its final position. Rank 1 of 4:

    publish    x_1 to its own slot, block by block         never waits
    pull       from x_1    from slot 2    from slot 3    from slot 0
               no wait     all of x_2     all of x_3     all of x_0

Each owner reads one contiguous range of each source's order, which all ranks have. But its tokens are scattered over x,
so a program waits for all of a source before it reads a row. Pushed rows, k per token, would be copied twice, because
their receiver must reorder them, and a slot would need room for everything that a routing may send to one rank.

    orders     choices of one source by (expert, choice)  ->  choice // (choices per row of x): its row of x
    arrivals   rows by (source, expert, choice)           ->  by (expert, source, choice)

Peers may still read a slot after its rank has left the call. They arrive in the next call only after they have left
this one, and no rank writes the slot again before all have arrived there: see Note [Two rotating buffers] in
signals.py.

A combine pushes segments: all rows from one rank to another form one segment of the receiver's slot, in an order that
both know. A segment is sent in parts of the columns with one flag each, so that one part is summed while the next one
is in flight. An index tells the sender where to read each row. A rank's own rows go through its own slot too, so that
all of a token's choices are in one place.

    combine    rows of one source         ->  by (expert, choice)       ->  a token's choices, one by one

Programs 0 .. S-1, which start first, publish or send before they receive; the others receive at once. Blocks are taken
as programs become free (Note [Tickets] in signals.py). A sending program waits only when all blocks to be sent have
been taken and it has published its own, so one resident program per rank is enough. The program that stores the last
block covered by a flag sets the flag: Note [One flag of many programs] there.
"""

import triton
import triton.language as tl

from . import signals
from .tiles import cdiv, copy_rows, inline, narrow, shard, to_int64, widen


@inline
def segment(begins, p):
    """(first row, number of rows) of segment p; begins int32 [W + 1]."""
    first = tl.load(begins + p)
    return first, tl.load(begins + p + 1) - first


@inline
def overflows(peers, totals, max_rows):
    """Whether an owner would get more than max_rows rows. All ranks find the same; their first programs record it."""
    found = tl.full((), 0, tl.int32)
    for owner in range(peers.world_size):
        total = tl.load(totals + owner)
        if total > max_rows:
            found += 1
            if tl.program_id(0) == 0:
                signals.record(peers, signals.OVERFLOW, owner, 0, max_rows, total)
    return found > 0


@inline
def push_segments(
    peers,
    x,
    stride_xm,
    stride_xk,
    index,  # row of x for each row of the segments
    begins,  # [W + 1]: where the segment for each receiver begins
    places,  # [W]: where it belongs in the receiver's slot
    K,
    part_columns,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Send blocks until all are taken, part by part of the columns: to rank + 1, ..., and to this rank last.

    Flag p belongs to part p of a segment. It is published when all its blocks are stored, and late: a program counts
    its blocks of a segment after it stores some of the next. Note [Late publish] in matmul_reduce_scatter.py.
    """
    world: tl.constexpr = peers.world_size
    if tl.program_id(0) == 0:
        signals.arrive(peers)
    stored = tl.full((), -1, tl.int32)  # part * world + receiver
    held, blocks_of_stored = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    done = tl.full((), 0, tl.int32)  # blocks of earlier segments
    piece = signals.take(peers, signals.PUSH)
    for part in range(cdiv(K, part_columns)):
        first = part * part_columns
        columns = tl.minimum(part_columns, K - first)
        for step in range(1, world + 1):
            dst = (signals.rank_of(peers) + step) % world
            begin, count = segment(begins, dst)
            blocks = tl.maximum(cdiv(count, BLOCK_M), 1)  # an empty segment is published, too
            if piece < done + blocks:
                out = signals.slot(peers, dst).to(tl.pointer_type(x.dtype.element_ty))
                out = tl.multiple_of(out, 16) + to_int64(tl.load(places + dst)) * K + first
                mine = tl.full((), 0, tl.int32)
                while piece < done + blocks:
                    at = (piece - done) * BLOCK_M + tl.arange(0, BLOCK_M)
                    inside = at < count
                    rows = tl.load(index + begin + at, mask=inside, other=0).to(tl.int64)
                    copy_rows(
                        x + to_int64(first) * stride_xk, rows, stride_xm, stride_xk, out, at.to(tl.int64), K, inside,
                        columns, BLOCK_K,
                    )  # fmt: skip
                    mine += 1
                    piece = signals.take(peers, signals.PUSH)
                publish_stored(peers, stored, held, blocks_of_stored)
                stored, held, blocks_of_stored = part * world + dst, mine, blocks
            done += blocks
    publish_stored(peers, stored, held, blocks_of_stored)


@inline
def publish_stored(peers, stored, held, blocks):
    """Count this program's `held` of the `blocks` blocks of `stored`: part * world + receiver, or -1 if there is none.

    The program that counts the last block publishes.
    """
    if stored >= 0:
        dst, part = stored % peers.world_size, stored // peers.world_size
        if signals.complete_pieces(peers, dst, part, held, blocks):
            signals.publish(peers, dst, part)


@inline
def publish_rows(
    peers,
    sizes,
    begins,
    choices_per_row,
    x,
    stride_xm,
    stride_xk,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copy blocks of x to this rank's slot until all are taken. Sets flag 0 when all are stored.

    If no rows are sent, as in most rounds of an exchange in rounds, nothing is copied.
    """
    if tl.program_id(0) == 0:
        signals.arrive(peers)
    rank = signals.rank_of(peers)
    size, _offset = shard(sizes, rank, peers.world_size)
    count = tl.where(tl.load(begins + peers.world_size) > 0, size // choices_per_row, 0)
    out = tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(x.dtype.element_ty)), 16)
    blocks = tl.maximum(cdiv(count, BLOCK_M), 1)
    mine = tl.full((), 0, tl.int32)
    block = signals.take(peers, signals.PUSH)
    while block < blocks:
        at = block * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = at.to(tl.int64)
        copy_rows(x, rows, stride_xm, stride_xk, out, rows, K, at < count, K, BLOCK_K)
        mine += 1
        block = signals.take(peers, signals.PUSH)
    if mine > 0:
        if signals.complete_pieces(peers, 0, 0, mine, blocks):
            signals.publish_to_all(peers, 0)


@inline
def pull_block(
    x,  # the source's x, or its slot
    stride_xm,
    stride_xk,
    wanted,  # the source's choices of this rank's experts
    choices_per_row,
    arrivals,  # of the source's rows
    count,
    rows,
    K,
    block,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copy one block of the rows that this rank wants from a source to their final positions."""
    at = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = at < count
    taken = tl.load(wanted + at, mask=inside, other=0) // choices_per_row
    to = tl.load(arrivals + at, mask=inside, other=0).to(tl.int64)
    copy_rows(x, taken.to(tl.int64), stride_xm, stride_xk, rows, to, K, inside, K, BLOCK_K)


@triton.jit(do_not_specialize=["choices_per_row", "max_rows", "send_programs"])
def moe_dispatch_kernel(
    peers,
    sizes,  # choices of every rank, a tuple, see Note [Odd integers] in signals.py
    x,
    stride_xm,
    stride_xk,
    choices_per_row,  # number of consecutive choices that share a row of x
    begins,  # int32 [W + 1], where the rows for each owner begin in this rank's order
    orders,  # int32, every rank's choices by (expert, choice), one rank after another
    in_sources,  # int32 [W], where this rank's rows begin in each source's order
    sources,  # int32 [W + 1], where each source's rows begin among this rank's, by (source, expert, choice)
    arrivals,  # int32 [max_rows], the final position of each of these
    totals,  # int32 [W], rows of each owner
    max_rows,
    rows,  # contiguous
    K,
    send_programs,
    BLOCK_M: tl.constexpr,
    PULL_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A slot holds [T_r, K], this rank's x; flag 0 covers all of it."""
    if signals.failed(peers):
        return
    if overflows(peers, totals, max_rows):
        return
    world: tl.constexpr = peers.world_size
    if tl.program_id(0) < send_programs:
        publish_rows(peers, sizes, begins, choices_per_row, x, stride_xm, stride_xk, K, BLOCK_M, BLOCK_K)
    rank = signals.rank_of(peers)
    done = tl.full((), 0, tl.int32)  # blocks of earlier sources
    ticket = signals.take(peers, signals.TILE)
    for step in range(world):
        src = (rank + step) % world
        _size, offset = shard(sizes, src, world)
        wanted = orders + offset + tl.load(in_sources + src)
        begin, count = segment(sources, src)
        end = done + cdiv(count, PULL_M)
        if src == rank:
            while ticket < end:
                pull_block(
                    x, stride_xm, stride_xk, wanted, choices_per_row, arrivals + begin, count, rows, K, ticket - done,
                    PULL_M, BLOCK_K,
                )  # fmt: skip
                ticket = signals.take(peers, signals.TILE)
        else:
            if ticket < end:
                signals.wait(peers, src, 0)
            published = signals.slot(peers, src).to(tl.pointer_type(x.dtype.element_ty))
            while ticket < end:
                pull_block(
                    tl.multiple_of(published, 16), to_int64(K), 1, wanted, choices_per_row, arrivals + begin, count,
                    rows, K, ticket - done, PULL_M, BLOCK_K,
                )  # fmt: skip
                ticket = signals.take(peers, signals.TILE)
        done = end
    if tl.program_id(0) == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)


@inline
def sum_choices(
    pushed,  # rows [arrived, N] of this rank's slot
    arrived,
    choices,  # int32 [T, TOP_K], where in the slot each choice's row is; past the last row if it is dropped
    weights,  # fp32 [T, TOP_K], or None for ones
    out,  # contiguous [T, N]
    T,
    N,
    first_col,
    last_col,
    start,
    programs,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[:, first_col:last_col] of every `programs`-th block of tokens from `start` on: choices in order, in fp32."""
    for first in range(start * BLOCK_M, T, programs * BLOCK_M):
        tokens = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        for n in range(first_col, last_col, BLOCK_N):
            cols = n + tl.arange(0, BLOCK_N)
            acc = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
            for j in range(TOP_K):
                choice = tl.load(choices + tokens * TOP_K + j, mask=tokens < T, other=arrived)
                kept = choice < arrived
                at = choice.to(tl.int64)[:, None] * N + cols[None, :]
                part = tl.load(pushed + at, mask=kept[:, None] & (cols < last_col)[None, :], other=0.0)
                part = widen(part).to(tl.float32)
                if weights is not None:
                    part *= tl.load(weights + tokens * TOP_K + j, mask=kept, other=0.0)[:, None]
                acc += part
            mask = (tokens < T)[:, None] & (cols < last_col)[None, :]
            tl.store(out + tokens[:, None] * N + cols[None, :], narrow(acc, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["max_rows", "send_programs"])
def moe_combine_kernel(
    peers,
    y,
    stride_ym,
    stride_yn,
    arrivals,  # int32, row of y for each row that this rank sends, by (source, expert, choice)
    sources,  # int32 [W + 1], where the rows for each source begin among those
    places,  # int32 [W], where this rank's rows begin in each source's slot
    begins,  # int32 [W + 1], where each owner's rows begin in this rank's slot
    totals,  # int32 [W], rows of each owner
    max_rows,
    choices,  # int32 [T, TOP_K], where in the slot each choice's row is; past the last row if it is dropped
    weights,  # fp32 [T, TOP_K], or None for ones
    out,  # contiguous [T, N]
    T,
    N,
    part_columns,
    send_programs,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    if signals.failed(peers):
        return
    if overflows(peers, totals, max_rows):
        return
    world: tl.constexpr = peers.world_size
    if tl.program_id(0) < send_programs:
        push_segments(
            peers,
            y,
            stride_ym,
            stride_yn,
            arrivals,
            sources,
            places,
            N,
            part_columns,
            BLOCK_M,
            BLOCK_N,
        )
    arrived = tl.load(begins + world)
    pushed = signals.slot(peers, signals.rank_of(peers)).to(tl.pointer_type(y.dtype.element_ty))
    pushed = tl.multiple_of(pushed, 16)
    blocks = cdiv(T, BLOCK_M)
    ticket = signals.take(peers, signals.TILE)
    for part in range(cdiv(N, part_columns)):
        if ticket < (part + 1) * blocks:
            signals.wait_chunk_of_all(peers, part)
        first_col = part * part_columns
        last_col = tl.minimum(first_col + part_columns, N)
        while ticket < (part + 1) * blocks:
            sum_choices(
                pushed, arrived, choices, weights, out, T, N, first_col, last_col, ticket - part * blocks, blocks,
                TOP_K, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            ticket = signals.take(peers, signals.TILE)
    if tl.program_id(0) == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)
