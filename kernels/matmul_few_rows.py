"""y = reduce_scatter(sum_i x_i @ w_i.T) + bias, or the all-reduce, for so few rows that one tile holds them all.

    x_i      [T, K_i]    this rank's columns of the full inputs, T <= BLOCK_M
    w_i      [N, K_i]
    y        [R_r, N]    rows of this rank, summed over ranks; for an all-reduce [T, N], the same bits on every rank

matmul_reduce_scatter.py multiplies each owner's rows separately. With few rows, the time of a tile is the time to load
its block of w, and each block is loaded once per owner. Here a tile holds the rows of all owners, and each owner is
sent its rows. A call is short, so it has three phases instead of rounds. Programs take work as they become free, in
this order:

    products    column 0      column 1      ...   multiply, store each owner's rows in its slot, publish to all
    sums        own rows of column 0 from all sources, then of column 1 ...
    copies      all-reduce only: the pushed sums of column 0 into y, then of column 1 ...

A program waits only for columns that have all been taken, and when it has published all its work (Note [Late publish]
in matmul_reduce_scatter.py), so one resident program per rank is enough. Slots, partials and sums are those of
matmul_reduce_scatter.py and matmul_all_reduce.py: partials are summed in fp32 in rank order and rounded once.
"""

import triton
import triton.language as tl

from . import signals
from .matmul_reduce_scatter import part_of_tile, partial_tile, publish_stored_to_all, sum_chunk, sums_at
from .tiles import cdiv, shard, to_int64


@triton.jit(do_not_specialize=["group", "total"])
def few_rows_kernel(
    peers,
    sizes,  # tuple of world_size, see Note [Odd integers] in signals.py
    total,
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
    result_at,  # all-reduce only: byte offset of the sums in the slot; the partials come before
    flags,  # likewise: the first flag of the sums
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PART_M: tl.constexpr,
    PRODUCTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BROADCAST: tl.constexpr,  # an all-reduce
    TMA: tl.constexpr = False,
    X_TMA: tl.constexpr = False,
    ACROSS: tl.constexpr = False,  # the w_i by TMA, each as [K_i, N]
    w_descriptor0=None,  # with TMA: of the w_i
    w_descriptor1=None,
    w_descriptor2=None,
    w_descriptor3=None,
    x_descriptor0=None,  # with X_TMA: of the x_i
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
    element: tl.constexpr = y.dtype.element_ty
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    if tl.program_id(0) == 0:
        signals.arrive(peers)
    num_cols = cdiv(N, BLOCK_N)
    chunks = tl.where(total > 0, cdiv(num_cols, group), 0)
    stored = tl.full((), -1, tl.int32)
    ticket = signals.take(peers, signals.TILE)
    while ticket < chunks:
        for col in range(ticket * group, tl.minimum((ticket + 1) * group, num_cols)):
            rows = tl.arange(0, BLOCK_M)
            value, cols, col_mask = partial_tile(
                xs,
                0,
                rows,
                rows < total,
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
            stored = publish_stored_to_all(peers, stored)
            for step in range(1, world + 1):
                owner = (rank + step) % world
                size, offset = shard(sizes, owner, world)
                local = rows - offset
                owned = (local >= 0) & (local < size)
                out = tl.multiple_of(signals.slot(peers, owner).to(tl.pointer_type(element)), 16)
                at = (to_int64(rank) * size + local)[:, None] * N + cols[None, :]
                tl.store(out + at, value, mask=owned[:, None] & col_mask[None, :])
        stored = ticket
        ticket = signals.take(peers, signals.TILE)
    publish_stored_to_all(peers, stored)
    own, before = shard(sizes, rank, world)
    begin = to_int64(before) * N
    while ticket < 2 * chunks:
        chunk = ticket - chunks
        sums = y
        if BROADCAST:
            sums = y + begin
        sum_chunk(
            peers,
            chunk,
            0,
            BLOCK_M,
            own,
            bias,
            sums,
            result_at,
            begin,
            flags + chunk,
            N,
            group,
            BLOCK_M,
            BLOCK_N,
            GROUP,
            PART_M,
            BROADCAST,
        )
        if BROADCAST:
            if own == 0:  # every rank waits for this flag of every rank
                signals.publish_to_all(peers, flags + chunk)
        ticket = signals.take(peers, signals.TILE)
    if BROADCAST:
        result = sums_at(peers, rank, result_at, element)
        while ticket < 3 * chunks:
            chunk = ticket - 2 * chunks
            signals.wait_chunk_of_all(peers, flags + chunk)
            for col in range(chunk * group, tl.minimum((chunk + 1) * group, num_cols)):
                for side in range(2):  # rows before this rank's own, then rows after
                    top = tl.where(side == 0, 0, before + own)
                    last = tl.where(side == 0, before, total)
                    for first in range(top, last, PART_M):
                        at, mask, _cols = part_of_tile(first, last, col, N, PART_M, BLOCK_N)
                        tl.store(y + at, tl.load(result + at, mask=mask), mask=mask)
            ticket = signals.take(peers, signals.TILE)
    if tl.program_id(0) == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)
