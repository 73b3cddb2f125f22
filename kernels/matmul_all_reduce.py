"""y = all_reduce(x @ w.T) + bias in one launch: one shot for a small output, else two shots.

    x        [T, K_r]    this rank's columns of the full input
    w        [N, K_r]
    y        [T, N]      the same bits on every rank

One shot: every partial tile goes to every rank, and every rank sums all tiles. One hop, W times the bytes.

    products    program p of P takes tiles p, p + P, ... and stores each at all ranks while it multiplies the next one
    publish     all its tiles, to all ranks
    sums        the same tiles, when program p of every rank has published

Program p waits only for programs p of other ranks, which publish before they wait, and a GPU starts programs in
ascending order: so one resident program per rank is enough.

Two shots: the reduce-scatter of matmul_reduce_scatter.py over rows (split like torch.chunk), where owners also push
each chunk of sums to all ranks. A program that finds no more tiles copies the pushed sums into y. It waits for sums,
which wait only for products, and all of both have been taken before (Note [Tickets] in signals.py).

fp8 products are scaled before they are sent, as in matmul_reduce_scatter.py.

Partials are summed in fp32 in rank order and rounded once; with two shots one rank does this for all. So all ranks hold
the same bits.
"""

import triton
import triton.language as tl

from . import signals
from .matmul_reduce_scatter import part_of_tile, partial_tile, reduce_scatter, reduced_tile, sums_at
from .tiles import cdiv, grouped, inline, narrow, shard, to_int64


@inline
def place_of_tile(row, col, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_N: tl.constexpr):
    """(offset of a tile among a rank's partials, where each tile is contiguous; its number of columns there)."""
    begin = to_int64(row) * BLOCK_M * N + to_int64(col) * BLOCK_N * tl.minimum(BLOCK_M, M - row * BLOCK_M)
    if EVEN_N:
        return begin, BLOCK_N
    else:
        return begin, tl.minimum(BLOCK_N, N - col * BLOCK_N)


@triton.jit
def one_shot_kernel(
    peers,
    xs,  # (x,)
    strides_xm,
    strides_xk,
    ws,  # (w,)
    strides_wn,
    strides_wk,
    bias,  # [N] or None
    y,  # contiguous
    M,
    N,
    Ks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PART_M: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,  # BLOCK_N divides N
    TMA: tl.constexpr = False,
    X_TMA: tl.constexpr = False,
    ACROSS: tl.constexpr = False,  # w by TMA, as [K, N]
    w_descriptor0=None,  # with TMA: of w
    x_descriptor0=None,  # with X_TMA: of x
    x_scale=None,  # fp8 only: fp32, one per row of x, or one for all with stride 0
    stride_xs=None,
    w_scale=None,
    stride_ws=None,
):
    """A slot holds [W, M * N], the partials of all ranks tile by tile. Flag p belongs to program p."""
    if signals.failed(peers):
        return
    if TMA:
        ws = (w_descriptor0,)
    if X_TMA:
        xs = (x_descriptor0,)
    if x_scale is None:
        scales = None
    else:
        scales = (x_scale, stride_xs, w_scale, stride_ws)
    pid = tl.program_id(0)
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    element: tl.constexpr = y.dtype.element_ty
    if pid == 0:
        signals.arrive(peers)
    num_rows = cdiv(M, BLOCK_M)
    num_cols = cdiv(N, BLOCK_N)
    tiles = num_rows * num_cols
    own = to_int64(rank) * M * N
    for tile in range(pid, tiles, tl.num_programs(0)):
        row, col = grouped(tile, num_rows, num_cols, GROUP)
        rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
        value, cols, col_mask = partial_tile(
            xs,
            row * BLOCK_M,
            rows,
            rows < M,
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
            element,
            scales,
        )
        begin, width = place_of_tile(row, col, M, N, BLOCK_M, BLOCK_N, EVEN_N)
        at = begin + tl.arange(0, BLOCK_M)[:, None] * width + tl.arange(0, BLOCK_N)[None, :]
        mask = (rows < M)[:, None] & col_mask[None, :]
        for step in range(1, world + 1):
            out = signals.slot(peers, (rank + step) % world).to(tl.pointer_type(element))
            tl.store(tl.multiple_of(out, 16) + own + at, value, mask=mask)
    if pid < tiles:
        signals.publish_to_all(peers, pid)
        signals.wait_chunk_of_all(peers, pid)
    base = tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(element)), 16)
    for tile in range(pid, tiles, tl.num_programs(0)):
        row, col = grouped(tile, num_rows, num_cols, GROUP)
        begin, width = place_of_tile(row, col, M, N, BLOCK_M, BLOCK_N, EVEN_N)
        last = tl.minimum((row + 1) * BLOCK_M, M)
        for first in range(row * BLOCK_M, last, PART_M):
            at, mask, cols = part_of_tile(first, last, col, N, PART_M, BLOCK_N)
            local = first - row * BLOCK_M + tl.arange(0, PART_M)
            there = begin + local[:, None] * width + tl.arange(0, BLOCK_N)[None, :]
            acc = reduced_tile(base, to_int64(M) * N, there, mask, bias, cols, N, world, 8)
            tl.store(y + at, narrow(acc, element), mask=mask)
    if pid == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)


@triton.jit(do_not_specialize=["group", "window", "behind"])
def two_shot_kernel(
    peers,
    sizes,  # rows that each rank sums, a tuple, see Note [Odd integers] in signals.py
    xs,  # (x,)
    strides_xm,
    strides_xk,
    ws,  # (w,)
    strides_wn,
    strides_wk,
    bias,  # [N] or None
    y,  # contiguous
    N,
    Ks,
    group,
    window,
    behind,
    result_at,  # byte offset of the sums in the slot; the partials come before
    flags,  # of the sums, see reduce_scatter
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PART_M: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr = False,
    X_TMA: tl.constexpr = False,
    ACROSS: tl.constexpr = False,  # w by TMA, as [K, N]
    w_descriptor0=None,  # with TMA: of w
    x_descriptor0=None,  # with X_TMA: of x
    x_scale=None,  # fp8 only: fp32, one per row of x, or one for all with stride 0
    stride_xs=None,
    w_scale=None,
    stride_ws=None,
):
    """A slot holds [W, R_r, N], partials of this rank's rows, and from byte result_at on [M, N], sums of all owners."""
    if signals.failed(peers):
        return
    if TMA:
        ws = (w_descriptor0,)
    if X_TMA:
        xs = (x_descriptor0,)
    if x_scale is None:
        scales = None
    else:
        scales = (x_scale, stride_xs, w_scale, stride_ws)
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    _own, before = shard(sizes, rank, world)
    chunks = reduce_scatter(
        peers,
        sizes,
        1,
        xs,
        strides_xm,
        strides_xk,
        ws,
        strides_wn,
        strides_wk,
        bias,
        y + to_int64(before) * N,
        result_at,
        to_int64(before) * N,
        flags,
        N,
        Ks,
        group,
        window,
        behind,
        1,  # part per sum: with more, each with its own flags, the second shot loses more time than the first saves
        BLOCK_M,
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
        True,
        scales,
    )
    num_cols = cdiv(N, BLOCK_N)
    result = sums_at(peers, rank, result_at, y.dtype.element_ty)
    piece = signals.take(peers, signals.PUSH)
    while piece < chunks * (world - 1):
        owner, chunk = (rank + 1 + piece % (world - 1)) % world, piece // (world - 1)
        size, offset = shard(sizes, owner, world)
        num_rows = cdiv(size, BLOCK_M)
        last_tile = tl.minimum((chunk + 1) * group, num_rows * num_cols)
        if chunk * group < last_tile:
            signals.wait(peers, owner, flags + chunk)
        for tile in range(chunk * group, last_tile):
            row, col = grouped(tile, num_rows, num_cols, GROUP)
            last = tl.minimum((row + 1) * BLOCK_M, size)
            for first in range(row * BLOCK_M, last, PART_M):
                at, mask, _cols = part_of_tile(first, last, col, N, PART_M, BLOCK_N)
                at += to_int64(offset) * N
                tl.store(y + at, tl.load(result + at, mask=mask), mask=mask)
        piece = signals.take(peers, signals.PUSH)
    if tl.program_id(0) == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)
