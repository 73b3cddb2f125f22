"""Rows between the tokens' ranks and the experts' owners: dispatch and combine, one launch each.

    dispatch   x [T_r, K]        -> rows [max_rows, K] of this rank's experts
    combine    y [max_rows, N]   -> out [T_r, N], the weighted sum of each token's choices

In a dispatch owners pull. Every rank publishes its x once, in its own slot, with one flag at every peer when all of it
is there; an owner reads the rows that it wants where they lie and stores them where they belong. Rank 1 of 4:

    publish    x_1 to the own slot, block by block         never waits
    pull       from x_1    from slot 2    from slot 3    from slot 0
               no wait     all of x_2     all of x_3     all of x_0

Each owner reads one contiguous range of each source's order, which all ranks have; but the tokens lie all over x, so a
program waits for all of a source before it reads a row. Rows that are pushed, k to a token, are copied twice, as their
receiver must bring them in order, and a slot must have room for all that a routing may send to one.

    orders     choices of one source by (expert, choice)  ->  choice // (choices that a row of x is of): its row of x
    arrivals   rows by (source, expert, choice)           ->  by (expert, source, choice)

Peers may still read a slot when its rank has left the call. They arrive in the next call when they have left this one
too, and no rank writes the slot again before all have arrived there: see Note [Two rotating buffers] in signals.py.

A combine pushes segments: what one rank has for another lies in one piece in the receiver's slot, in an order that both
know. It travels in parts of the columns with a flag each, so that one part is summed while the next one is on its way.
An index says from where the sender takes each row. Its own rows go through its own slot too, so that a token's choices
are all in one place.

    combine    rows of one source         ->  by (expert, choice)       ->  a token's choices, one by one

Programs 0 .. S-1 publish or send and never wait; the others receive: one resident program a rank is enough. A flag is
set by the last program that has stored its share: Note [One flag of many programs] in signals.py.
"""

import triton
import triton.language as tl

from . import signals
from .tiles import cdiv, copy_rows, dealt, inline, narrow, shard, to_int64, widen


@inline
def segment(begins, p):
    """(first row, number of rows) of segment p; begins int32 [W + 1]."""
    first = tl.load(begins + p)
    return first, tl.load(begins + p + 1) - first


@inline
def overflows(peers, totals, max_rows):
    """Whether an owner would get more rows than it has room for. All ranks see the same, and one program records it."""
    found = tl.full((), 0, tl.int32)
    for owner in range(peers.world_size):
        total = tl.load(totals + owner)
        if total > max_rows:
            found += 1
            if tl.program_id(0) == 0:
                signals.record(peers, signals.OVERFLOW, owner, 0, max_rows, total)
    return found > 0


@inline
def push_blocks(
    x,
    stride_xm,
    stride_xk,
    index,  # row of x for each row of the segment
    out,  # of the segment in the receiver's slot, rows of K
    count,
    K,
    columns,  # that are copied of each row, from where x and out point to
    start,
    mine,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copy `mine` blocks of a segment's rows, every `programs`-th from `start` on."""
    for step in range(mine):
        at = (start + step * programs) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = at < count
        rows = tl.load(index + at, mask=inside, other=0).to(tl.int64)
        copy_rows(x, rows, stride_xm, stride_xk, out, at.to(tl.int64), K, inside, columns, BLOCK_K)


@inline
def push_segments(
    peers,
    x,
    stride_xm,
    stride_xk,
    index,  # row of x for each row of the segments
    begins,  # [W + 1]: segment of each receiver
    places,  # [W]: where in each receiver's slot
    K,
    part_columns,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Send stage: program_id < programs copies blocks to rank + 1, ..., and to this rank last; part by part of columns.

    Flag p is part p of a segment, published when all programs have stored their blocks of it, and late, see Note [Late
    publish] in matmul_reduce_scatter.py: a program counts itself out of a segment when it has stored of the next one.
    """
    world: tl.constexpr = peers.world_size
    start = tl.program_id(0)
    if start == 0:
        signals.arrive(peers)
    stored = tl.full((), -1, tl.int32)  # part * world + receiver
    for part in range(cdiv(K, part_columns)):
        first = part * part_columns
        columns = tl.minimum(part_columns, K - first)
        for step in range(1, world + 1):
            dst = (signals.rank_of(peers) + step) % world
            begin, count = segment(begins, dst)
            out = signals.slot(peers, dst).to(tl.pointer_type(x.dtype.element_ty))
            out = tl.multiple_of(out, 16) + to_int64(tl.load(places + dst)) * K + first
            blocks = cdiv(count, BLOCK_M)
            mine = dealt(start, blocks, programs)
            push_blocks(
                x + to_int64(first) * stride_xk, stride_xm, stride_xk, index + begin, out, count, K, columns, start,
                mine, programs, BLOCK_M, BLOCK_K,
            )  # fmt: skip
            start += mine * programs - blocks
            publish_stored(peers, stored, programs)
            stored = part * world + dst
    publish_stored(peers, stored, programs)


@inline
def publish_stored(peers, stored, programs):
    """Count this program out of part * world + receiver, if there is one: -1 is none. The last one publishes it."""
    if stored >= 0:
        dst, part = stored % peers.world_size, stored // peers.world_size
        if signals.complete(peers, dst, part, programs):
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
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Publish stage: program_id < programs copies blocks of x to the own slot; flag 0, when all have.

    Nothing is copied where nothing is sent, as in most rounds of an exchange in rounds.
    """
    pid = tl.program_id(0)
    if pid == 0:
        signals.arrive(peers)
    rank = signals.rank_of(peers)
    size, _offset = shard(sizes, rank, peers.world_size)
    count = tl.where(tl.load(begins + peers.world_size) > 0, size // choices_per_row, 0)
    out = tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(x.dtype.element_ty)), 16)
    for block in range(pid, cdiv(count, BLOCK_M), programs):
        at = block * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = at.to(tl.int64)
        copy_rows(x, rows, stride_xm, stride_xk, out, rows, K, at < count, K, BLOCK_K)
    if signals.complete(peers, 0, 0, programs):
        signals.publish_to_all(peers, 0)


@inline
def pull_rows(
    x,  # of the source: its x, or its slot
    stride_xm,
    stride_xk,
    wanted,  # its slots that chose this rank's experts
    choices_per_row,
    arrivals,  # of its rows
    count,
    rows,
    K,
    start,
    mine,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copy `mine` blocks of the rows that are wanted of a source, from `start` on, to where they belong."""
    for step in range(mine):
        block = start + step * programs
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
    choices_per_row,  # how many neighbouring choices a row of x stands for
    begins,  # int32 [W + 1], which of this rank's rows go to each owner
    orders,  # int32, every rank's choices by (expert, choice), one rank after another
    in_sources,  # int32 [W], where this rank's rows begin in each source's order
    sources,  # int32 [W + 1], which of this rank's rows, by (source, expert, choice), are of each source
    arrivals,  # int32 [max_rows], where each of them belongs
    totals,  # int32 [W], rows of each owner
    max_rows,
    rows,  # contiguous
    K,
    send_programs,
    BLOCK_M: tl.constexpr,
    PULL_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A slot holds [T_r, K], this rank's x; flag 0 is all of it."""
    if signals.failed(peers):
        return
    if overflows(peers, totals, max_rows):
        return
    world: tl.constexpr = peers.world_size
    if tl.program_id(0) < send_programs:
        publish_rows(
            peers, sizes, begins, choices_per_row, x, stride_xm, stride_xk, K, send_programs, BLOCK_M, BLOCK_K
        )  # fmt: skip
    else:
        rank = signals.rank_of(peers)
        start = tl.program_id(0) - send_programs
        programs = tl.num_programs(0) - send_programs
        leader = start == 0
        for step in range(world):
            src = (rank + step) % world
            _size, offset = shard(sizes, src, world)
            wanted = orders + offset + tl.load(in_sources + src)
            begin, count = segment(sources, src)
            blocks = cdiv(count, PULL_M)
            mine = dealt(start, blocks, programs)
            if src == rank:
                pull_rows(
                    x, stride_xm, stride_xk, wanted, choices_per_row, arrivals + begin, count, rows, K, start, mine,
                    programs, PULL_M, BLOCK_K,
                )  # fmt: skip
            else:
                if mine > 0:
                    signals.wait(peers, src, 0)
                published = signals.slot(peers, src).to(tl.pointer_type(x.dtype.element_ty))
                pull_rows(
                    tl.multiple_of(published, 16), to_int64(K), 1, wanted, choices_per_row, arrivals + begin, count,
                    rows, K, start, mine, programs, PULL_M, BLOCK_K,
                )  # fmt: skip
            start += mine * programs - blocks
        if leader:
            signals.wait_all_arrivals(peers)
    signals.leave(peers)


@inline
def sum_choices(
    pushed,  # rows [arrived, N] of this rank's slot
    arrived,
    choices,  # int32 [T, TOP_K], where in the slot each choice's row is; past the last one of a dropped choice
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
    """out[:, first_col:last_col], every `programs`-th block of tokens from `start` on: choices in order, in fp32."""
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
    sources,  # int32 [W + 1], which of those go to each source
    places,  # int32 [W], where this rank's rows begin in each source's slot
    begins,  # int32 [W + 1], which rows of this rank's slot are of each owner
    totals,  # int32 [W], rows of each owner
    max_rows,
    choices,  # int32 [T, TOP_K], where in the slot each choice's row is; past the last one of a dropped choice
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
            send_programs,
            BLOCK_M,
            BLOCK_N,
        )
    else:
        rank = signals.rank_of(peers)
        arrived = tl.load(begins + world)
        pushed = signals.slot(peers, rank).to(tl.pointer_type(y.dtype.element_ty))
        pushed = tl.multiple_of(pushed, 16)
        start, programs = tl.program_id(0) - send_programs, tl.num_programs(0) - send_programs
        for part in range(cdiv(N, part_columns)):
            signals.wait_chunk_of_all(peers, part)
            first_col = part * part_columns
            last_col = tl.minimum(first_col + part_columns, N)
            sum_choices(
                pushed, arrived, choices, weights, out, T, N, first_col, last_col, start, programs, TOP_K, BLOCK_M,
                BLOCK_N,
            )  # fmt: skip
        if start == 0:
            signals.wait_all_arrivals(peers)
    signals.leave(peers)
