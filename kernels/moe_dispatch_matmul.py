"""A dispatch and the matmul of its rows in one launch: an expert's tiles start when its rows have arrived.

    x [T_r, K]  ->  rows [max_rows, K] of this rank's experts  ->  y [max_rows, N], by the weights of each row's expert

Rows are pushed in segments as in moe_exchange.py, including a rank's own rows, into the receiver's slot. Segments are
split into chunks with one flag each. Programs 0 .. S-1 send before they multiply, the others only multiply. Two
sources, three experts, time to the right; e.g. 0a is a chunk of rows of expert 0:

    send       0a to 1 | 0a to 0 | 0b 1a to 1 | 0b 1a to 0 | 2a to 1 | ...     multiply, too
    multiply             tiles of expert 0            | tiles of expert 1 | tiles of expert 2

A segment is in expert order, and the first chunk goes to all owners before the second goes to any. So an owner's expert
0 is complete long before its last expert. Before its first tile of an expert, a multiplying program waits only for the
chunks that hold rows of that expert, from all sources: it polls all of them at once, and one by one only if some are
late. It reads the rows in the slot, through an index from a row's place to where it arrived. If the weight gradients
need the rows, each tile in a row of tiles stores a part of their columns.

Chunks and tiles are taken one at a time, see Note [Tickets] in signals.py. Senders are the lowest-numbered programs,
and do not wait before all chunks are taken: one resident program per rank is enough.

Rows in slots are read by pointers (Note [Generic proxy]). Tiles, their order and their sums are those of
grouped_matmul.py, so the results are bitwise equal.
"""

import triton
import triton.language as tl

from . import signals
from .grouped_matmul import first_row, group_tile, last_row
from .matmul import tile_of
from .moe_exchange import overflows, segment
from .tiles import cdiv, copy_rows, inline, to_int64

AT_ONCE = tl.constexpr(8)  # flags per source that are polled at once


@inline
def most_chunks(begins, chunk_rows, WORLD: tl.constexpr):
    """Number of chunks in the longest segment; begins int32 [W + 1]."""
    most = tl.full((), 0, tl.int32)
    for p in range(WORLD):
        _begin, count = segment(begins, p)
        most = tl.maximum(most, count)
    return cdiv(most, chunk_rows)


@inline
def push_by_expert(
    peers,
    x,
    stride_xm,
    stride_xk,
    index,
    begins,
    places,
    K,
    chunk_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Send chunks until all are taken. A chunk goes to all owners, this rank last, before the next goes to any.

    Flag c belongs to chunk c of a segment.
    """
    world: tl.constexpr = peers.world_size
    pieces = most_chunks(begins, chunk_rows, world) * world
    piece = signals.take(peers, signals.PUSH)
    while piece < pieces:
        chunk, dst = piece // world, (signals.rank_of(peers) + 1 + piece % world) % world
        begin, count = segment(begins, dst)
        if chunk * chunk_rows < count:
            out = signals.slot(peers, dst).to(tl.pointer_type(x.dtype.element_ty))
            out = tl.multiple_of(out, 16) + to_int64(tl.load(places + dst)) * K
            last = tl.minimum((chunk + 1) * chunk_rows, count)
            for first in range(chunk * chunk_rows, last, BLOCK_M):
                at = first + tl.arange(0, BLOCK_M)
                inside = at < last
                rows = tl.load(index + begin + at, mask=inside, other=0).to(tl.int64)
                copy_rows(x, rows, stride_xm, stride_xk, out, at.to(tl.int64), K, inside, K, BLOCK_K)
            signals.publish(peers, dst, chunk)
        piece = signals.take(peers, signals.PUSH)


@inline
def wait_expert(peers, blocks, E, chunk_rows, expert):
    """Wait for the chunks of every source that hold rows of this expert. They often have come: polls many at once."""
    world: tl.constexpr = peers.world_size
    lane = tl.arange(0, triton.next_power_of_2(world) * AT_ONCE)
    src = lane // AT_ONCE
    of_source = blocks + src * E
    begin = tl.load(of_source, mask=src < world, other=0)
    first = tl.load(of_source + expert, mask=src < world, other=0) - begin
    last = tl.load(of_source + expert + 1, mask=src < world, other=0) - begin
    chunk = first // chunk_rows + lane % AT_ONCE
    end = tl.where(first < last, cdiv(last, chunk_rows), 0)
    late = tl.full((), 0, tl.int32)
    for _ in range(cdiv(tl.max(end - first // chunk_rows, 0), AT_ONCE)):
        late += signals.missing(peers, tl.where(chunk < end, src, world), chunk)
        chunk += AT_ONCE
    if late > 0:
        for p in range(world):
            rows = blocks + p * E
            front = tl.load(rows)
            top, bottom = tl.load(rows + expert) - front, tl.load(rows + expert + 1) - front
            if top < bottom:
                signals.wait_chunks(peers, p, top // chunk_rows, cdiv(bottom, chunk_rows))


@triton.jit(do_not_specialize=["max_rows", "chunk_rows", "send_programs"])
def moe_dispatch_matmul_kernel(
    peers,
    x,
    stride_xm,
    stride_xk,
    index,  # int32, row of x for each row that this rank sends, by (expert, choice)
    begins,  # int32 [W + 1], where the rows for each owner begin among those
    places,  # int32 [W], where this rank's rows begin in each owner's slot
    blocks,  # int32 [W * E + 1], where the rows of each source and expert begin in this rank's slot
    origins,  # int32 [max_rows], where in the slot each row arrived
    offsets,  # int32 [E + 1], where the rows of each expert begin
    totals,  # int32 [W], rows of each owner
    max_rows,
    rows,  # contiguous, or None if not needed
    w,  # a pointer, or with TMA a descriptor, as is w2
    w2,  # with w's strides: w and w2 are gate and up; None in a plain matmul
    strides,  # (stride_we, stride_wn, stride_wk)
    y,  # contiguous, as are the two products, which are None if not needed
    gate_out,
    up_out,
    E,
    N,
    K,
    chunk_rows,
    send_programs,
    COPY_M: tl.constexpr,
    COPY_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    HALVES: tl.constexpr,
    ACT: tl.constexpr,  # activation of a gated matmul, else ""
    PRECISION: tl.constexpr = "ieee",
    TMA: tl.constexpr = False,
    ACROSS: tl.constexpr = False,
):
    if signals.failed(peers):
        return
    if overflows(peers, totals, max_rows):
        return
    if tl.program_id(0) == 0:
        signals.arrive(peers)
    if tl.program_id(0) < send_programs:
        push_by_expert(peers, x, stride_xm, stride_xk, index, begins, places, K, chunk_rows, COPY_M, COPY_K)
    pushed = signals.slot(peers, signals.rank_of(peers)).to(tl.pointer_type(x.dtype.element_ty))
    pushed = tl.multiple_of(pushed, 16)
    stride_we, stride_wn, stride_wk = strides
    num_cols = cdiv(N, BLOCK_N)
    if rows is not None:
        num_cols = tl.maximum(num_cols, 1)
    kept = cdiv(cdiv(K, num_cols), BLOCK_K) * BLOCK_K
    done = tl.full((), 0, tl.int32)  # tiles of earlier experts
    end = first_row(offsets, max_rows)
    ticket = signals.take(peers, signals.TILE)
    for expert in range(E):
        begin = end
        end = last_row(offsets, expert, begin, max_rows)
        num_rows = cdiv(end - begin, BLOCK_M)
        if ticket < done + num_rows * num_cols:
            wait_expert(peers, blocks, E, chunk_rows, expert)
        while ticket < done + num_rows * num_cols:
            row, col = tile_of(ticket - done, num_rows, num_cols, BLOCK_M, BLOCK_N, GROUP)
            if rows is not None:
                first = col // BLOCK_N * kept
                if first < K:
                    at = begin + row + tl.arange(0, BLOCK_M)
                    came = tl.load(origins + at, mask=at < end, other=0).to(tl.int64)
                    copy_rows(
                        pushed + first, came, to_int64(K), 1, rows + first, at.to(tl.int64), K, at < end,
                        tl.minimum(kept, K - first), BLOCK_K,
                    )  # fmt: skip
            group_tile(
                origins, pushed, w, None, w2, (K, 1, stride_we, stride_wn, stride_wk), None, y, gate_out, up_out,
                expert, begin + row, end, col, N, K, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, HALVES, ACT, PRECISION, TMA,
                False, ACROSS,
            )  # fmt: skip
            ticket = signals.take(peers, signals.TILE)
        done += num_rows * num_cols
    if tl.program_id(0) == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)
