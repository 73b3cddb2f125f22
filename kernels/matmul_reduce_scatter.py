"""y = reduce_scatter(sum_i x_i @ w_i.T) + bias in one launch: partial tiles go directly to the rank that sums them.

    x_i      [T, K_i]    this rank's columns of the full inputs, all rows in global order
    w_i      [N, K_i]
    y        [R_r, N]    rows of this rank, summed over ranks; the bias is added once

The gradient of an input of several weights is a sum of several products: no operand is copied to merge them.

Every program multiplies, sends the tile to the rank that owns its rows, and sums tiles of its own rank's rows, in
ticket order (Note [Tickets] in signals.py). Owner p's slot has a buffer [R_p, N] for every source, including itself.
Flag c belongs to chunk c: `group` consecutive tiles of the owner's rows, multiplied by one program. Chunks are handed
out in rounds of one window per owner; a window is large enough that every program gets a chunk. Rank 1 of 4, time to
the right:

    round           0           1           2           3           4           end
    rows of         2 3 0 1     2 3 0 1     2 3 0 1     2 3 0 1     2 3 0 1
    window          0 0 0 0     1 1 1 1     2 2 2 2     3 3 3 3     4 4 4 4
    summed                                        0           1                 2 3 4

So every owner receives all the time, each time from a different source. A program that has multiplied a chunk of its
own rank's rows sums one that was sent `behind` chunks earlier and so has arrived. The last round does not: all programs
sum the remaining chunks at the end, in parts, because a single program would take half as long to read a tile of all
sources as to multiply one. Sums that other ranks wait for (matmul_all_reduce.py) are not split: each part would need a
fence and a flag to every rank.

A program waits for chunk c only when all chunks up to c have been taken on its rank, for all owners, and it has
published its own. Consider the lowest chunk that any program waits for. On each rank, it has been published, or a
program that is not waiting works on it, or no program waits at all. So one resident program per rank is enough.

Note [Late publish]: a release, and the program that issues it, waits until the earlier stores have landed at the far
end of a link. So a program stores a chunk and multiplies its next tile while the stores are in flight. It publishes the
chunk only before it stores that tile, or before it sums:

    one program     products of a | store a | products of b | publish a | store b | publish b | sum of c | ...

A chunk is not published at all if the call has failed meanwhile.

Predicted by fusedtp.sim.timed for 8 H100, 8192 tokens in bf16, the down projection of an MLP, in microseconds (not
measured over NVLink yet; one H100 takes 646 for the product of the 70B):

                fused    product alone    product and NCCL
    Llama 3 8B     199              173                 364
    Llama 3 70B    702              668                1018

The 8B's 1024 tiles fill 132 SMs 7.8 times; the time for the sums makes that nine rounds instead of eight.

fp8 products are multiplied by one scale per row of x and one per row of w, both this rank's own, before a tile is
rounded and sent.

Partials are stored in the working dtype, including the rank's own, then summed in fp32 in rank order and rounded once:
the result does not depend on the order of arrival.
"""

import triton
import triton.language as tl

from . import signals
from .epilogue import add_bias, scaled
from .matmul import IEEE, descriptor_loop, dot_loop, mixed_loop
from .tiles import cdiv, decoded, grouped, inline, narrow, shard, tile_rows, to_int64, widen


@inline
def partial_tile(
    xs,
    row,
    rows,
    row_mask,
    strides_xm,
    strides_xk,
    ws,
    strides_wn,
    strides_wk,
    col,
    N,
    Ks,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    ACROSS: tl.constexpr,
    ELEMENT: tl.constexpr,
    scales=None,
):
    """(tile of sum_i x_i @ w_i.T as ELEMENT, its columns, their mask). `row` is the first of `rows`, for TMA.

    scales   of one product: x_scale, its stride, w_scale and its stride
    TMA may load rows that row_mask excludes: another owner's, or zeros past the end of x. Their products are not used.
    """
    cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < N
    acc = tl.full((rows.shape[0], BLOCK_N), 0, tl.float32)
    for i in tl.static_range(PRODUCTS):
        if X_TMA:
            acc = descriptor_loop(acc, xs[i], row, ws[i], col * BLOCK_N, Ks[i], BLOCK_K, False, IEEE, ACROSS)
        else:
            a = xs[i] + (rows.to(tl.int64) * strides_xm[i])[:, None]
            if TMA:
                acc = mixed_loop(
                    acc,
                    a,
                    row_mask[:, None],
                    strides_xk[i],
                    ws[i],
                    col * BLOCK_N,
                    Ks[i],
                    BLOCK_K,
                    EVEN_K,
                    IEEE,
                    ACROSS,
                )
            else:
                b = ws[i] + (cols.to(tl.int64) * strides_wn[i])[None, :]
                acc = dot_loop(
                    acc,
                    a,
                    row_mask[:, None],
                    strides_xk[i],
                    b,
                    col_mask[None, :],
                    strides_wk[i],
                    Ks[i],
                    BLOCK_K,
                    EVEN_K,
                )
    if scales is not None:
        x_scale, stride_xs, w_scale, stride_ws = scales
        acc = scaled(acc, x_scale, stride_xs, rows, row_mask, w_scale, stride_ws, cols, col_mask)
    return narrow(acc, ELEMENT), cols, col_mask


@inline
def publish_stored(peers, stored):
    """Publish a chunk that is stored but not yet published; `stored` is world * chunk + owner, or -1. Returns -1."""
    if stored >= 0:
        signals.publish(peers, stored % peers.world_size, stored // peers.world_size)
    return tl.full((), -1, tl.int32)


@inline
def publish_stored_to_all(peers, stored):
    """The same for a chunk that is stored at all ranks; `stored` is the chunk, or -1."""
    if stored >= 0:
        signals.publish_to_all(peers, stored)
    return tl.full((), -1, tl.int32)


@inline
def send_chunk(
    peers,
    stored,
    owner,
    chunk,
    size,
    offset,
    total,
    batch,
    xs,
    strides_xm,
    strides_xk,
    ws,
    strides_wn,
    strides_wk,
    N,
    Ks,
    group,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    ACROSS: tl.constexpr,
    ELEMENT: tl.constexpr,
    scales,
):
    """Multiply a chunk of the owner's rows, store it in its slot, return the new `stored`. See Note [Late publish]."""
    limit = size * batch
    num_rows, num_cols = cdiv(limit, BLOCK_M), cdiv(N, BLOCK_N)
    last = tl.minimum((chunk + 1) * group, num_rows * num_cols)
    out = tl.multiple_of(signals.slot(peers, owner).to(tl.pointer_type(ELEMENT)), 16)
    out += to_int64(signals.rank_of(peers)) * limit * N
    for tile in range(chunk * group, last):
        row, col = grouped(tile, num_rows, num_cols, GROUP)
        local = row * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = local < limit
        rows = tile_rows(local, size, offset, total, batch, limit)
        value, cols, col_mask = partial_tile(
            xs,
            offset + row * BLOCK_M,
            rows,
            inside,
            strides_xm,
            strides_xk,
            ws,
            strides_wn,
            strides_wk,
            col,
            N,
            Ks,
            BLOCK_N,
            BLOCK_K,
            PRODUCTS,
            EVEN_K,
            TMA,
            X_TMA,
            ACROSS,
            ELEMENT,
            scales,
        )
        stored = publish_stored(peers, stored)
        at = local.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(out + at, value, mask=inside[:, None] & col_mask[None, :])
    return tl.where(chunk * group < last, chunk * peers.world_size + owner, stored)  # a short shard has fewer chunks


@inline
def part_of_tile(first, last, col, N, PART_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(element offsets, mask, columns) of PART_M rows of a tile column, from `first` on; rows before `last` exist.

    Sums do not use the matmul's tile shape: the 64-bit offsets of a whole tile would not fit in registers.
    """
    rows = first + tl.arange(0, PART_M)
    cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    return at, (rows < last)[:, None] & (cols < N)[None, :], cols


@inline
def reduced_tile(base, stride_source, at, mask, bias, cols, N, WORLD: tl.constexpr, AT_ONCE: tl.constexpr = 2):
    """Sum of all sources' partials in rank order in fp32, plus bias. AT_ONCE sources' partials are loaded at a time."""
    acc = tl.full((at.shape[0], at.shape[1]), 0, tl.float32)
    for src in tl.range(0, WORLD, loop_unroll_factor=AT_ONCE):
        acc += widen(tl.load(base + src * stride_source + at, mask=mask, other=0.0)).to(tl.float32)
    return add_bias(acc, bias, cols, cols < N)


@inline
def sum_chunk(
    peers,
    chunk,
    part,
    part_rows,
    limit,
    bias,
    y,
    result_at,
    sums_begin,
    flag,
    N,
    group,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    PART_M: tl.constexpr,
    BROADCAST: tl.constexpr,
):
    """Wait for a chunk of this rank's `limit` rows, and sum one part of each tile: `part_rows` rows."""
    element: tl.constexpr = y.dtype.element_ty
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    partials = tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(element)), 16)
    num_rows, num_cols = cdiv(limit, BLOCK_M), cdiv(N, BLOCK_N)
    last_tile = tl.minimum((chunk + 1) * group, num_rows * num_cols)
    if chunk * group < last_tile:
        signals.wait_chunk_of_all(peers, chunk)
        for tile in range(chunk * group, last_tile):
            row, col = grouped(tile, num_rows, num_cols, GROUP)
            begin, last = part_of_rows(row, part, part_rows, limit, BLOCK_M)
            for first in range(begin, last, PART_M):
                at, mask, cols = part_of_tile(first, last, col, N, PART_M, BLOCK_N)
                acc = reduced_tile(partials, to_int64(limit) * N, at, mask, bias, cols, N, world)
                value = narrow(acc, element)
                tl.store(y + at, value, mask=mask)
                if BROADCAST:
                    for step in range(1, world):
                        out = sums_at(peers, (rank + step) % world, result_at, element)
                        tl.store(out + sums_begin + at, value, mask=mask)
        if BROADCAST:
            signals.publish_to_all(peers, flag)


@inline
def part_of_rows(row, part, part_rows, limit, BLOCK_M: tl.constexpr):
    """(first, end) of the rows in one part of a row of tiles."""
    first = row * BLOCK_M + part * part_rows
    return first, tl.minimum(tl.minimum(first + part_rows, (row + 1) * BLOCK_M), limit)


@inline
def sums_at(peers, rank, result_at, ELEMENT: tl.constexpr):
    """Where a rank's slot holds the sums of all owners. An alignment hint before the cast would be lost."""
    out = (signals.slot(peers, rank) + result_at).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(out, 16)


@inline
def sum_turn(at, chunks, left, parts, height, BLOCK_M: tl.constexpr):
    """(chunk, part, rows per tile) of sum number `at`: whole chunks, then the last `left`, each in `parts` parts."""
    whole = chunks - left
    if at < whole:
        chunk, part, rows = at, 0 * at, 0 * at + BLOCK_M
    else:
        chunk, part, rows = whole + (at - whole) // parts, (at - whole) % parts, 0 * at + height
    return chunk, part, rows


@inline
def reduce_scatter(
    peers,
    sizes,
    batch,
    xs,
    strides_xm,
    strides_xk,
    ws,
    strides_wn,
    strides_wk,
    bias,
    y,
    result_at,
    sums_begin,
    flags,
    N,
    Ks,
    group,
    window,
    behind,
    parts,
    height,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PART_M: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    ACROSS: tl.constexpr,
    BROADCAST: tl.constexpr,
    scales=None,
):
    """Multiply, send and sum until all tickets are taken. y [R_r, N]. Returns the number of chunks.

    BROADCAST: the sums also go to all peers, at byte result_at of the slot plus sums_begin elements. Flag flags + i
    announces sum number i of sum_turn; if parts is 1, that is chunk i.
    """
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    if tl.program_id(0) == 0:
        signals.arrive(peers)
    own, _offset = shard(sizes, rank, world)
    total, longest = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    for q in tl.static_range(world):
        total += decoded(sizes[q])
        longest = tl.maximum(longest, decoded(sizes[q]))
    tiles = cdiv(longest * batch, BLOCK_M) * cdiv(N, BLOCK_N)
    chunks = cdiv(cdiv(tiles, group), window) * window
    left = tl.minimum(behind + window, chunks)
    stored = tl.full((), -1, tl.int32)
    ticket = signals.take(peers, signals.TILE)
    while ticket < chunks * world + left * parts:
        turn = chunks - left + ticket - chunks * world  # number of the sum, see sum_turn
        if ticket < chunks * world:
            owner = (rank + 1 + ticket // window) % world
            chunk = ticket // (window * world) * window + ticket % window
            size, offset = shard(sizes, owner, world)
            stored = send_chunk(
                peers,
                stored,
                owner,
                chunk,
                size,
                offset,
                total,
                batch,
                xs,
                strides_xm,
                strides_xk,
                ws,
                strides_wn,
                strides_wk,
                N,
                Ks,
                group,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                GROUP,
                PRODUCTS,
                EVEN_K,
                TMA,
                X_TMA,
                ACROSS,
                y.dtype.element_ty,
                scales,
            )
            turn = tl.where((owner == rank) & (chunk < chunks - window), chunk - behind, -1)
        if turn >= 0:
            stored = publish_stored(peers, stored)
            chunk, part, part_rows = sum_turn(turn, chunks, left, parts, height, BLOCK_M)
            sum_chunk(
                peers,
                chunk,
                part,
                part_rows,
                own * batch,
                bias,
                y,
                result_at,
                sums_begin,
                flags + turn,
                N,
                group,
                BLOCK_M,
                BLOCK_N,
                GROUP,
                PART_M,
                BROADCAST,
            )
        ticket = signals.take(peers, signals.TILE)
    publish_stored(peers, stored)
    return chunks


@triton.jit(do_not_specialize=["group", "window", "behind", "parts", "height"])
def matmul_reduce_scatter_kernel(
    peers,
    sizes,  # tuple of world_size, see Note [Odd integers] in signals.py
    batch,
    xs,  # here and below tuples, one entry per product
    strides_xm,
    strides_xk,
    ws,
    strides_wn,
    strides_wk,
    bias,  # [N] or None
    y,  # contiguous
    N,
    Ks,
    group,
    window,
    behind,
    parts,
    height,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PART_M: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr = False,
    X_TMA: tl.constexpr = False,
    ACROSS: tl.constexpr = False,  # the w_i by TMA, each as [K_i, N]
    w_descriptor0=None,  # with TMA: of the w_i. Not a tuple: launchers of Triton 3.6 and 3.7 miss them in tuples
    w_descriptor1=None,
    w_descriptor2=None,
    w_descriptor3=None,
    x_descriptor0=None,  # with X_TMA: of the x_i; then batch is 1
    x_descriptor1=None,
    x_descriptor2=None,
    x_descriptor3=None,
    x_scale=None,  # fp8 only: fp32, one per row of x, or one for all with stride 0
    stride_xs=None,
    w_scale=None,
    stride_ws=None,
):
    if signals.failed(peers):
        return
    if TMA:
        ws = (w_descriptor0, w_descriptor1, w_descriptor2, w_descriptor3)
    if X_TMA:
        xs = (x_descriptor0, x_descriptor1, x_descriptor2, x_descriptor3)
    if x_scale is None:
        scales = None
    else:
        scales = (x_scale, stride_xs, w_scale, stride_ws)
    reduce_scatter(
        peers,
        sizes,
        batch,
        xs,
        strides_xm,
        strides_xk,
        ws,
        strides_wn,
        strides_wk,
        bias,
        y,
        0,
        0,
        0,
        N,
        Ks,
        group,
        window,
        behind,
        parts,
        height,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        GROUP,
        PART_M,
        PRODUCTS,
        EVEN_K,
        TMA,
        X_TMA,
        ACROSS,
        False,
        scales,
    )
    if tl.program_id(0) == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)
