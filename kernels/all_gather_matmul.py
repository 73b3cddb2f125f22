"""y_i = all_gather(x) @ w_i.T + bias_i for several weights, one gather, in one launch.

    x_r      [R_r, K]   rows of rank r: R_r = batch * size_r
    w_i      [N_i, K]
    y_i      [T, N_i]   T = sum of R_r, rows in global order

Programs 0 .. S-1 send before they multiply, the others only multiply. A rank's shard travels in chunks of whole rows;
each chunk has a flag at each peer. Rank 1 of 4, time to the right:

    send       x_1 to rank 2        x_1 to rank 3        x_1 to rank 0       multiply, too
    multiply   x_1 (in place)       x_0 (sent first)     x_3                 x_2
               no wait              waits for 0's rows   ...

Ranks send to their successor first, so the predecessor's shard is complete first, and tiles are handed out in the order
of shards rank, rank - 1, ...; no program is idle at the end of a shard. A tile waits only for the chunks that cover its
rows.

Chunks and tiles are taken one at a time, see Note [Tickets] in signals.py. Senders are the lowest-numbered programs,
and do not wait before all chunks are taken: one resident program per rank is enough. Ranks push instead of pull, so
that every wait polls a flag in the rank's own memory.

fp8 rows travel with their scales, row_bytes each: the K values, and in the last SCALE_BYTES of the row one fp32. The
products of a row are multiplied by its scale, and by one scale per column of a weight (w_scales).

With S = 0 no program sends: copies beside the kernel bring the rows and set the same flags, chunk by chunk, see Note
[Copies beside a kernel] in comm/copies.py. The first program signals the arrival before it waits for anything.
"""

import triton
import triton.language as tl

from . import signals
from .epilogue import scaled
from .matmul import IEEE, linear_tile, mixed_tile
from .tiles import (
    cdiv,
    copy_rows,
    copy_rows_ahead,
    grouped,
    halves,
    inline,
    narrow,
    shard,
    tile_rows,
    to_int64,
    widen,
)

SCALE_BYTES = tl.constexpr(16)  # of an fp8 row: its scale, padded so that rows stay multiples of 16 bytes


@inline
def push_rows(
    peers,
    sizes,
    batch,
    x,
    stride_xm,
    stride_xk,
    K,
    chunk_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copy chunks of x to every peer, the successor first, until all are taken.

    The gathered tensor in a slot is [T, K], shard after shard. Flag c belongs to chunk c.
    """
    rank = signals.rank_of(peers)
    size, offset = shard(sizes, rank, peers.world_size)
    rows = size * batch
    chunks = cdiv(rows, chunk_rows)
    piece = signals.take(peers, signals.PUSH)
    while piece < chunks * (peers.world_size - 1):
        dst = (rank + 1 + piece // chunks) % peers.world_size
        chunk = piece % chunks
        out = signals.slot(peers, dst).to(tl.pointer_type(x.dtype.element_ty))
        out = tl.multiple_of(out, 16) + to_int64(offset) * batch * K
        last = tl.minimum((chunk + 1) * chunk_rows, rows)
        for first in range(chunk * chunk_rows, last, BLOCK_M):
            at = first + tl.arange(0, BLOCK_M)
            wide_at = at.to(tl.int64)
            copy_rows_ahead(x, wide_at, stride_xm, stride_xk, out, wide_at, K, at < last, K, BLOCK_K)
        signals.publish(peers, dst, chunk)
        piece = signals.take(peers, signals.PUSH)


@inline
def begin_gather(
    peers,
    sizes,
    batch,
    x,
    stride_xm,
    stride_xk,
    K,
    chunk_rows,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The first program signals the arrival before anything waits. The first `programs` push: none if copies do it."""
    if tl.program_id(0) == 0:
        signals.arrive(peers)
    if tl.program_id(0) < programs:
        push_rows(peers, sizes, batch, x, stride_xm, stride_xk, K, chunk_rows, BLOCK_M, BLOCK_K)


@inline
def wait_rows(peers, src, first, last, chunk_rows):
    """Wait for the chunks that cover the rows first, ..., last - 1 of the shard of `src`."""
    signals.wait_chunks(peers, src, first // chunk_rows, cdiv(last, chunk_rows))


@inline
def shard_source(peers, src, offset, batch, x, stride_xm, stride_xk, K, ALIGNED: tl.constexpr):
    """Pointer and strides of the shard of `src`: x itself, or the place in this rank's slot where `src` pushed it.

    Selected as integers: Triton 3.6 and 3.7 cannot select between pointers of different origin for AMD. This loses
    their known alignment, so ALIGNED says whether both are multiples of 16 bytes.
    """
    rank = signals.rank_of(peers)
    own = src == rank
    pushed = signals.slot(peers, rank).to(tl.pointer_type(x.dtype.element_ty))
    pushed = tl.multiple_of(pushed, 16) + to_int64(offset) * batch * K
    base = tl.where(own, x.to(tl.int64), pushed.to(tl.int64)).to(x.dtype)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return (
        base,
        tl.where(own, to_int64(stride_xm), to_int64(K)),
        tl.where(own, to_int64(stride_xk), to_int64(1)),
    )


@inline
def pick_weight(
    col,
    weights,
    widths,
    strides_wn,
    strides_wk,
    biases,
    outputs,
    NUM_WEIGHTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TMA: tl.constexpr,
):
    """The weight (with TMA its descriptor) of tile column `col`, the column within it, and its other operands.

    Addresses and strides are selected, so that the kernel contains the matmul once. Selecting among equal constants
    folds, so the compiler still knows a unit stride that all weights share. A descriptor is picked by a branch, which
    becomes a selection of its address among the parameters. A loop over K for each weight would spill.
    """
    w, y, width = weights[0], outputs[0], to_int64(widths[0])
    stride_wn, stride_wk = to_int64(strides_wn[0]), to_int64(strides_wk[0])
    bias = outputs[0] if biases[0] is None else biases[0]  # a placeholder that is never read
    has_bias = tl.full((), 0, tl.int64)
    if biases[0] is not None:
        has_bias += 1
    col_in = col
    before = tl.full((), 0, tl.int32)
    for i in tl.static_range(1, NUM_WEIGHTS):
        before += cdiv(widths[i - 1], BLOCK_N)
        here = col >= before
        if TMA:
            if here:
                w = weights[i]
        else:
            w = tl.where(here, weights[i], w)
        y = tl.where(here, outputs[i], y)
        width = tl.where(here, to_int64(widths[i]), width)
        stride_wn = tl.where(here, to_int64(strides_wn[i]), stride_wn)
        stride_wk = tl.where(here, to_int64(strides_wk[i]), stride_wk)
        col_in = tl.where(here, col - before, col_in)
        if biases[i] is not None:
            bias = tl.where(here, biases[i], bias)
            has_bias = tl.where(here, 1, has_bias)
        else:
            has_bias = tl.where(here, 0, has_bias)
    return w, col_in, width, stride_wn, stride_wk, bias, has_bias, y


@inline
def row_scales(base, row_bytes):
    """Address of the first packed row's fp32 scale, behind its values. The next row's is row_bytes // 4 further."""
    return (base.to(tl.int64) + row_bytes - SCALE_BYTES).to(tl.pointer_type(tl.float32))


@inline
def pick_scale(col, w_scales, strides_ws, widths, NUM_WEIGHTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """(scales, their stride) of the weight that tile column `col` belongs to."""
    w_scale, stride_ws = w_scales[0], to_int64(strides_ws[0])
    before = tl.full((), 0, tl.int32)
    for i in tl.static_range(1, NUM_WEIGHTS):
        before += cdiv(widths[i - 1], BLOCK_N)
        w_scale = tl.where(col >= before, w_scales[i], w_scale)
        stride_ws = tl.where(col >= before, to_int64(strides_ws[i]), stride_ws)
    return w_scale, stride_ws


@inline
def finish_rows(y, acc, bias, has_bias, rows, row_mask, cols, width, scales):
    """y[rows, cols] = acc + bias, rounded once; y is contiguous [T, width]. scales: what acc is scaled by, or None."""
    if scales is not None:
        x_scale, stride_xs, local, w_scale, stride_ws = scales
        acc = scaled(acc, x_scale, stride_xs, local, row_mask, w_scale, stride_ws, cols, cols < width)
    acc += widen(tl.load(bias + cols, mask=cols < width * has_bias, other=0.0)).to(tl.float32)[None, :]
    at = rows[:, None] * width + cols[None, :]
    tl.store(y + at, narrow(acc, y.dtype.element_ty), mask=row_mask[:, None] & (cols < width)[None, :])


@triton.jit(do_not_specialize=["chunk_rows", "send_programs"])
def all_gather_matmul_kernel(
    peers,
    sizes,  # tuple of world_size, see Note [Odd integers] in signals.py
    batch,
    x,
    stride_xm,
    stride_xk,
    K,
    weights,  # from here on tuples, one entry per weight
    widths,
    strides_wn,
    strides_wk,
    biases,  # entries may be None
    outputs,  # contiguous
    gathered,  # [T, K] contiguous, or None
    chunk_rows,
    send_programs,
    NUM_WEIGHTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COPY_M: tl.constexpr,
    COPY_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    ALIGNED: tl.constexpr,
    descriptor0=None,  # with TMA: of the weights. Not a tuple: launchers of Triton 3.6 and 3.7 miss them in tuples
    descriptor1=None,
    descriptor2=None,
    descriptor3=None,
    TMA: tl.constexpr = False,
    ACROSS: tl.constexpr = False,  # the weights by TMA, each as [K, N_i]
    HALVES: tl.constexpr = False,  # finish a tile's columns in two halves, which takes fewer registers
    row_bytes=None,  # length of packed fp8 rows
    w_scales=None,  # fp32, one per row of a weight, or one for all with stride 0
    strides_ws=None,
):
    if signals.failed(peers):
        return
    if row_bytes is None:
        length = K
    else:
        length = row_bytes
    begin_gather(peers, sizes, batch, x, stride_xm, stride_xk, length, chunk_rows, send_programs, COPY_M, COPY_K)
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    if TMA:
        operands = (descriptor0, descriptor1, descriptor2, descriptor3)
    else:
        operands = weights
    last_shard, total = shard(sizes, world - 1, world)
    total += last_shard
    num_cols = tl.full((), 0, tl.int32)
    for i in tl.static_range(NUM_WEIGHTS):
        num_cols += cdiv(widths[i], BLOCK_N)
    if gathered is not None:
        num_cols = tl.maximum(num_cols, 1)  # the first column of tiles also keeps the rows
    done = tl.full((), 0, tl.int32)  # tiles of earlier shards
    ticket = signals.take(peers, signals.TILE)
    for step in range(world):
        src = (rank - step + world) % world
        size, offset = shard(sizes, src, world)
        num_rows = cdiv(size * batch, BLOCK_M)
        base, stride_m, stride_k = shard_source(peers, src, offset, batch, x, stride_xm, stride_xk, length, ALIGNED)
        if row_bytes is not None:  # the same for all shards, so the strides take no registers
            stride_m, stride_k = to_int64(row_bytes), to_int64(1)
        while ticket < done + num_rows * num_cols:
            row, col = grouped(ticket - done, num_rows, num_cols, GROUP)
            first = row * BLOCK_M
            last = tl.minimum(first + BLOCK_M, size * batch)
            if src != rank:
                wait_rows(peers, src, first, last, chunk_rows)
            rows = first + tl.arange(0, BLOCK_M)
            inside = rows < last
            if gathered is not None:
                if col == 0:
                    copy_rows(
                        base,
                        rows.to(tl.int64),
                        stride_m,
                        stride_k,
                        gathered,
                        tile_rows(rows, size, offset, total, batch, last),
                        length,
                        inside,
                        length,
                        BLOCK_K,
                    )
            w, col, width, stride_wn, stride_wk, bias, has_bias, y = pick_weight(
                col, operands, widths, strides_wn, strides_wk, biases, outputs, NUM_WEIGHTS, BLOCK_N, TMA
            )
            cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
            col_mask = cols < width
            if TMA:
                acc = mixed_tile(
                    base,
                    rows,
                    inside,
                    stride_m,
                    stride_k,
                    w,
                    col * BLOCK_N,
                    K,
                    BLOCK_N,
                    BLOCK_K,
                    EVEN_K,
                    IEEE,
                    ACROSS,
                )
            else:
                acc = linear_tile(
                    base,
                    rows,
                    inside,
                    stride_m,
                    stride_k,
                    w,
                    cols,
                    col_mask,
                    stride_wn,
                    stride_wk,
                    K,
                    BLOCK_K,
                    EVEN_K,
                )
            # not before the loop, where they would occupy registers
            out_rows = tile_rows(rows, size, offset, total, batch, last)
            if w_scales is None:
                scales = None
            else:
                _row, of_all = grouped(ticket - done, num_rows, num_cols, GROUP)
                w_scale, stride_ws = pick_scale(of_all, w_scales, strides_ws, widths, NUM_WEIGHTS, BLOCK_N)
                scales = (row_scales(base, row_bytes), row_bytes // 4, rows, w_scale, stride_ws)
            if HALVES:
                left, right = halves(acc)
                half = col * BLOCK_N + tl.arange(0, BLOCK_N // 2)
                finish_rows(y, left, bias, has_bias, out_rows, inside, half, width, scales)
                finish_rows(y, right, bias, has_bias, out_rows, inside, half + BLOCK_N // 2, width, scales)
            else:
                finish_rows(y, acc, bias, has_bias, out_rows, inside, cols, width, scales)
            ticket = signals.take(peers, signals.TILE)
        done += num_rows * num_cols
    if tl.program_id(0) == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)
