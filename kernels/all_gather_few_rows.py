"""all_gather_matmul.py and all_gather_gated_matmul.py for few rows, which are gathered completely first.

    x_r      [R_r, K]   rows of rank r: R_r = batch * size_r
    y        as there; T = sum of R_r

Those kernels multiply each rank's rows separately, as they arrive. With few rows, the time of a tile is the time to
load its block of a weight, and every block is loaded once per rank. Here all programs send first, and a tile may hold
the rows of all ranks:

    push       columns 0, 1, ... of x_r to every rank, including this one: [T, K] in the slot, rows in global order
    prefetch   the beginning of a block of a weight, if T is small (prefetch.py)
    wait       once, for the last columns of all ranks
    products   tiles, those of one block of a weight one after another
    keep       columns 0, 1, ... of the slot into `gathered`, if requested

Pieces of each kind are taken one at a time, and a program waits when all pieces of x_r have been taken, see Note
[Tickets] in signals.py. The program that stores the last columns for a peer publishes them: Note [One flag of many
programs].
"""

import triton
import triton.language as tl

from . import signals
from .all_gather_matmul import finish_rows, pick_scale, pick_weight, row_scales
from .epilogue import add_bias
from .matmul import IEEE, linear_tile, mixed_tile, pair_loop, store_tile
from .prefetch import MOST_ROWS, prefetch_rows
from .swiglu import activated
from .tiles import cdiv, inline, shard, tile_rows, to_int64


@inline
def copy_part(src, src_rows, src_stride, src_stride_k, dst, dst_rows, K, inside, part, PART_K: tl.constexpr):
    """Copy one part of the columns of some rows, as bits; `dst` rows are contiguous, K elements each."""
    cols = part * PART_K + tl.arange(0, PART_K)
    mask = inside[:, None] & (cols < K)[None, :]
    at = cols[None, :].to(tl.int64)
    value = tl.load(src + src_rows[:, None] * src_stride + at * src_stride_k, mask=mask)
    tl.store(dst + dst_rows[:, None] * K + at, value, mask=mask)


@inline
def send_rows(
    peers,
    sizes,
    batch,
    x,
    stride_xm,
    stride_xk,
    K,
    COPY_M: tl.constexpr,
    PART_K: tl.constexpr,
):
    """Push pieces of this rank's rows until all are taken. Returns T, the number of rows of all ranks.

    The first program signals the arrival before anything waits.
    """
    if tl.program_id(0) == 0:
        signals.arrive(peers)
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    size, offset = shard(sizes, rank, world)
    last_shard, total = shard(sizes, world - 1, world)
    total += last_shard
    rows = size * batch
    parts = tl.maximum(cdiv(K, PART_K), 1)
    piece = signals.take(peers, signals.PUSH)
    while piece < parts * world:
        dst = (rank + 1 + piece) % world
        out = tl.multiple_of(signals.slot(peers, dst).to(tl.pointer_type(x.dtype.element_ty)), 16)
        for first in range(0, rows, COPY_M):
            at = first + tl.arange(0, COPY_M)
            there = tile_rows(at, size, offset, total, batch, rows)
            copy_part(x, at.to(tl.int64), stride_xm, stride_xk, out, there, K, at < rows, piece // world, PART_K)
        if signals.complete(peers, dst, 0, parts):
            signals.publish(peers, dst, 0)
        piece = signals.take(peers, signals.PUSH)
    return total * batch


@inline
def all_rows(peers, x):
    """Wait for the rows of all ranks. Returns their address in this rank's slot, [T, K] contiguous."""
    signals.wait_chunk_of_all(peers, 0)
    return tl.multiple_of(signals.slot(peers, signals.rank_of(peers)).to(tl.pointer_type(x.dtype.element_ty)), 16)


@inline
def keep_gathered(peers, base, gathered, T, K, ticket, before, COPY_M: tl.constexpr, PART_K: tl.constexpr):
    """Copy [T, K] out of the slot in parts. Their tickets follow those of the tiles, of which there are `before`."""
    while ticket < before + cdiv(K, PART_K):
        for first in range(0, T, COPY_M):
            rows = first + tl.arange(0, COPY_M)
            at = rows.to(tl.int64)
            copy_part(base, at, to_int64(K), to_int64(1), gathered, at, K, rows < T, ticket - before, PART_K)
        ticket = signals.take(peers, signals.TILE)


@triton.jit
def few_rows_gather_kernel(
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
    NUM_WEIGHTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COPY_M: tl.constexpr,
    PART_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    descriptor0=None,  # with TMA: of the weights
    descriptor1=None,
    descriptor2=None,
    descriptor3=None,
    TMA: tl.constexpr = False,
    ACROSS: tl.constexpr = False,  # the weights by TMA, each as [K, N_i]
    row_bytes=None,  # length of packed fp8 rows, see all_gather_matmul.py
    w_scales=None,  # fp32, one per row of a weight, or one for all with stride 0
    strides_ws=None,
):
    if signals.failed(peers):
        return
    if row_bytes is None:
        length = K
    else:
        length = row_bytes
    T = send_rows(peers, sizes, batch, x, stride_xm, stride_xk, length, COPY_M, PART_K)
    if BLOCK_M <= MOST_ROWS:
        col = tl.program_id(0)
        for i in tl.static_range(NUM_WEIGHTS):
            prefetch_rows(weights[i], col * BLOCK_N, widths[i], strides_wn[i], strides_wk[i], K, BLOCK_N, peers.clock)
            col -= cdiv(widths[i], BLOCK_N)
    base = all_rows(peers, x)
    if TMA:
        operands = (descriptor0, descriptor1, descriptor2, descriptor3)
    else:
        operands = weights
    num_rows = cdiv(T, BLOCK_M)
    num_cols = tl.full((), 0, tl.int32)
    for i in tl.static_range(NUM_WEIGHTS):
        num_cols += cdiv(widths[i], BLOCK_N)
    tiles = num_rows * num_cols
    ticket = signals.take(peers, signals.TILE)
    while ticket < tiles:
        rows = ticket % num_rows * BLOCK_M + tl.arange(0, BLOCK_M)
        of_all = ticket // num_rows
        w, col, width, stride_wn, stride_wk, bias, has_bias, y = pick_weight(
            of_all, operands, widths, strides_wn, strides_wk, biases, outputs, NUM_WEIGHTS, BLOCK_N, TMA
        )
        cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
        if TMA:
            acc = mixed_tile(
                base,
                rows,
                rows < T,
                to_int64(length),
                to_int64(1),
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
                rows < T,
                to_int64(length),
                to_int64(1),
                w,
                cols,
                cols < width,
                stride_wn,
                stride_wk,
                K,
                BLOCK_K,
                EVEN_K,
            )
        if w_scales is None:
            scales = None
        else:
            w_scale, stride_ws = pick_scale(of_all, w_scales, strides_ws, widths, NUM_WEIGHTS, BLOCK_N)
            scales = (row_scales(base, row_bytes), row_bytes // 4, rows, w_scale, stride_ws)
        finish_rows(y, acc, bias, has_bias, rows.to(tl.int64), rows < T, cols, width, scales)
        ticket = signals.take(peers, signals.TILE)
    if gathered is not None:
        keep_gathered(peers, base, gathered, T, length, ticket, tiles, COPY_M, PART_K)
    if tl.program_id(0) == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)


@triton.jit
def few_rows_gated_kernel(
    peers,
    sizes,  # tuple of world_size, see Note [Odd integers] in signals.py
    batch,
    x,
    stride_xm,
    stride_xk,
    K,
    gate,
    up,  # with gate's strides
    stride_wn,
    stride_wk,
    gate_bias,  # or None
    up_bias,
    y,  # contiguous, as are the two products, which are None if backward does not need them
    gate_out,
    up_out,
    gathered,  # [T, K] contiguous, or None
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COPY_M: tl.constexpr,
    PART_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACT: tl.constexpr,
):
    if signals.failed(peers):
        return
    T = send_rows(peers, sizes, batch, x, stride_xm, stride_xk, K, COPY_M, PART_K)
    if BLOCK_M <= MOST_ROWS:
        first = tl.program_id(0) * BLOCK_N
        prefetch_rows(gate, first, N, stride_wn, stride_wk, K, BLOCK_N, peers.clock)
        prefetch_rows(up, first, N, stride_wn, stride_wk, K, BLOCK_N, peers.clock)
    base = all_rows(peers, x)
    num_rows = cdiv(T, BLOCK_M)
    num_cols = cdiv(N, BLOCK_N)
    tiles = num_rows * num_cols
    ticket = signals.take(peers, signals.TILE)
    while ticket < tiles:
        rows = ticket % num_rows * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = ticket // num_rows * BLOCK_N + tl.arange(0, BLOCK_N)
        wide_cols = cols.to(tl.int64) * stride_wn
        g = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
        u = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
        g, u = pair_loop(
            g, u, base + (rows.to(tl.int64) * K)[:, None], (rows < T)[:, None], to_int64(1),
            gate + wide_cols[None, :], stride_wk, up + wide_cols[None, :], stride_wk, (cols < N)[None, :],
            K, BLOCK_K, EVEN_K, IEEE,
        )  # fmt: skip
        g = add_bias(g, gate_bias, cols, cols < N)
        u = add_bias(u, up_bias, cols, cols < N)
        mask = (rows < T)[:, None] & (cols < N)[None, :]
        if gate_out is not None:
            store_tile(gate_out, g, rows, cols, N, mask)
            store_tile(up_out, u, rows, cols, N, mask)
        store_tile(y, activated(g, ACT)[0] * u, rows, cols, N, mask)
        ticket = signals.take(peers, signals.TILE)
    if gathered is not None:
        keep_gathered(peers, base, gathered, T, K, ticket, tiles, COPY_M, PART_K)
    if tl.program_id(0) == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)
