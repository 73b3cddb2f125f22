"""y = reduce_scatter(x @ w.T) + bias in one launch: partial tiles go straight to the rank that sums them.

    x        [T, K_r]    this rank's columns of the full input, all rows in global order
    w        [N, K_r]
    y        [R_r, N]    rows of this rank, summed over ranks; the bias is added once

Programs 0 .. S-1 multiply and send, the others reduce. Owner p's slot has a place [R_p, N] for every source. Rank
1 of 4, time to the right:

    send       rows of 2       rows of 3       rows of 0       rows of 1 (own)
    reduce                                      waits for tile c of 0, 1, 2, 3, sums them in this order

so every owner receives all the time, from a different source each time, and the own tiles, which need not
travel, come last. Flag c is chunk c: `group` consecutive tiles of the owner's rows, done by one program.

Note [Late publish]: a release waits until the stores before it have landed, at the far end of a link, and the program
with it. So a sender stores a chunk and multiplies its next tile while the stores travel; only then it publishes the
chunk, before it stores that tile, and its last chunk at the end:

    one program     products of a | store a | products of b | publish a | store b | products of c | publish b | ...

A sender never waits, so a late publish is certain to happen; a call that has failed meanwhile is not published
at all. Reducers of this rank start when senders end, later than any of this could matter to them.

Predicted by fusedtp.sim.timed for 8 H100, 8192 tokens in bf16, the down projection of an MLP, in microseconds (not
measured on a GPU yet):

                published at once   published late   product alone   product and NCCL
    Llama 3 8B                360              220             173                364
    Llama 3 70B              1023              731             668               1017

Partials travel in the working dtype, the own one too, are summed in fp32 in rank order and rounded once: the
result does not depend on who was fast.
"""

import triton
import triton.language as tl

from . import signals
from .epilogue import add_bias
from .matmul import IEEE, descriptor_loop, linear_tile, mixed_tile
from .tiles import cdiv, grouped, inline, narrow, next_start, shard, tile_rows, to_int64, widen


@inline
def partial_tile(
    x,
    row,
    rows,
    row_mask,
    stride_xm,
    stride_xk,
    w,
    stride_wn,
    stride_wk,
    col,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """One tile of x @ w.T as ELEMENT, its columns and which of them exist. `row` is the first of rows, for TMA.

    Rows that TMA loads and row_mask excludes are another owner's, or zeros beyond x; their products are not stored.
    """
    cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
    col_mask = cols < N
    if X_TMA:
        acc = tl.full((rows.shape[0], BLOCK_N), 0, tl.float32)
        acc = descriptor_loop(acc, x, row, w, col * BLOCK_N, K, BLOCK_K, False, IEEE)
    elif TMA:
        acc = mixed_tile(
            x, rows, row_mask, stride_xm, stride_xk, w, col * BLOCK_N, K, BLOCK_N, BLOCK_K, EVEN_K
        )
    else:
        acc = linear_tile(
            x,
            rows,
            row_mask,
            stride_xm,
            stride_xk,
            w,
            cols,
            col_mask,
            stride_wn,
            stride_wk,
            K,
            BLOCK_K,
            EVEN_K,
        )
    return narrow(acc, ELEMENT), cols, col_mask


@inline
def push_partials(
    peers,
    sizes,
    batch,
    x,
    stride_xm,
    stride_xk,
    w,
    stride_wn,
    stride_wk,
    N,
    K,
    group,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Send stage: program_id < programs computes every owner's rows, own last, into the owner's slot."""
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    pid = tl.program_id(0)
    if pid == 0:
        signals.arrive(peers)
    last_shard, total = shard(sizes, world - 1, world)
    total += last_shard
    num_cols = cdiv(N, BLOCK_N)
    stored = tl.full(
        (), -1, tl.int32
    )  # world * chunk + owner of the chunk that is not published yet, if there is one
    for step in range(1, world + 1):
        owner = (rank + step) % world
        size, offset = shard(sizes, owner, world)
        limit = size * batch
        num_rows = cdiv(limit, BLOCK_M)
        tiles = num_rows * num_cols
        out = tl.multiple_of(signals.slot(peers, owner).to(tl.pointer_type(ELEMENT)), 16)
        out += to_int64(rank) * limit * N
        for chunk in range(pid, cdiv(tiles, group), programs):
            for tile in range(chunk * group, tl.minimum((chunk + 1) * group, tiles)):
                row, col = grouped(tile, num_rows, num_cols, GROUP)
                local = row * BLOCK_M + tl.arange(0, BLOCK_M)
                inside = local < limit
                rows = tile_rows(local, size, offset, total, batch, limit)
                value, cols, col_mask = partial_tile(
                    x,
                    offset + row * BLOCK_M,
                    rows,
                    inside,
                    stride_xm,
                    stride_xk,
                    w,
                    stride_wn,
                    stride_wk,
                    col,
                    N,
                    K,
                    BLOCK_N,
                    BLOCK_K,
                    EVEN_K,
                    TMA,
                    X_TMA,
                    ELEMENT,
                )
                if stored >= 0:  # Note [Late publish]
                    signals.publish(peers, stored % world, stored // world)
                    stored = tl.full((), -1, tl.int32)
                at = local.to(tl.int64)[:, None] * N + cols[None, :]
                tl.store(out + at, value, mask=inside[:, None] & col_mask[None, :])
            stored = chunk * world + owner
        pid = next_start(pid, cdiv(tiles, group), programs)
    if stored >= 0:
        signals.publish(peers, stored % world, stored // world)


@inline
def part_of_tile(first, col, limit, N, PART_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Element offsets and mask of PART_M rows of a tile column, and its columns.

    A sum holds no accumulator of the matmul's shape: a whole tile's 64-bit offsets would not fit the registers.
    """
    rows = first + tl.arange(0, PART_M)
    cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    return at, (rows < limit)[:, None] & (cols < N)[None, :], cols


@inline
def reduced_tile(base, stride_source, at, mask, bias, cols, N, WORLD: tl.constexpr):
    """Sum of the sources' partials in rank order in fp32, plus bias."""
    acc = tl.full((at.shape[0], at.shape[1]), 0, tl.float32)
    for src in range(WORLD):
        acc += widen(tl.load(base + src * stride_source + at, mask=mask, other=0.0)).to(tl.float32)
    return add_bias(acc, bias, cols, cols < N)


@triton.jit(do_not_specialize=["group", "send_programs"])
def matmul_reduce_scatter_kernel(
    peers,
    sizes,  # tuple of world_size, see Note [Odd integers] in signals.py
    batch,
    x,  # a pointer, or with X_TMA a TMA descriptor; then batch is 1
    stride_xm,
    stride_xk,
    w,  # a pointer, or with TMA a TMA descriptor
    stride_wn,
    stride_wk,
    bias,  # [N] or None
    y,  # contiguous
    N,
    K,
    group,
    send_programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PART_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr = False,
    X_TMA: tl.constexpr = False,
):
    if signals.failed(peers):
        return
    if tl.program_id(0) < send_programs:
        push_partials(
            peers,
            sizes,
            batch,
            x,
            stride_xm,
            stride_xk,
            w,
            stride_wn,
            stride_wk,
            N,
            K,
            group,
            send_programs,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            GROUP,
            EVEN_K,
            TMA,
            X_TMA,
            y.dtype.element_ty,
        )
    else:
        rank = signals.rank_of(peers)
        size, _offset = shard(sizes, rank, peers.world_size)
        limit = size * batch
        num_rows = cdiv(limit, BLOCK_M)
        num_cols = cdiv(N, BLOCK_N)
        tiles = num_rows * num_cols
        base = tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(y.dtype.element_ty)), 16)
        start, programs = tl.program_id(0) - send_programs, tl.num_programs(0) - send_programs
        for chunk in range(start, cdiv(tiles, group), programs):
            signals.wait_chunk_of_all(peers, chunk)
            for tile in range(chunk * group, tl.minimum((chunk + 1) * group, tiles)):
                row, col = grouped(tile, num_rows, num_cols, GROUP)
                for first in range(row * BLOCK_M, tl.minimum((row + 1) * BLOCK_M, limit), PART_M):
                    at, mask, cols = part_of_tile(first, col, limit, N, PART_M, BLOCK_N)
                    acc = reduced_tile(base, to_int64(limit) * N, at, mask, bias, cols, N, peers.world_size)
                    tl.store(y + at, narrow(acc, y.dtype.element_ty), mask=mask)
        if start == 0:
            signals.wait_all_arrivals(peers)
