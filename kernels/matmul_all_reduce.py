"""y = all_reduce(x @ w.T) + bias in one launch, for a small output in one shot, else in two.

    x        [T, K_r]    this rank's columns of the full input
    w        [N, K_r]
    y        [T, N]      the same bits on every rank

One shot: every partial tile goes to every rank, and every rank sums all tiles. One hop, W times the bytes.

    send       tile 0 to all     tile 1 to all     ...
    reduce                       waits for tile 0 of all ranks, sums

A tile is published late, see Note [Late publish] in matmul_reduce_scatter.py.

Two shots: reduce-scatter over rows (split as torch.chunk does), then each owner pushes its sums to all.

    send       rows of 2     rows of 3     rows of 0     rows of 1 (own)
    reduce                                 own tiles: sums of all ranks, stored in y and at every peer
    collect                                              copies what the owners pushed into y

Stages ascend send, reduce, collect, and a program waits only for lower ones. Partials are summed in fp32 in rank
order and rounded once, and in two shots by one rank for all; so all ranks hold the same bits.
"""

import triton
import triton.language as tl

from . import signals
from .matmul_reduce_scatter import part_of_tile, partial_tile, push_partials, reduced_tile
from .tiles import cdiv, grouped, inline, narrow, shard, to_int64


@triton.jit(do_not_specialize=["group", "send_programs"])
def one_shot_kernel(
    peers,
    x,  # a pointer, or with X_TMA a TMA descriptor
    stride_xm,
    stride_xk,
    w,  # a pointer, or with TMA a TMA descriptor
    stride_wn,
    stride_wk,
    bias,  # [N] or None
    y,  # contiguous
    M,
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
    """A slot holds [W, M, N], the partials of all ranks; flag c is chunk c, `group` consecutive tiles."""
    if signals.failed(peers):
        return
    pid = tl.program_id(0)
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    element: tl.constexpr = y.dtype.element_ty
    num_rows = cdiv(M, BLOCK_M)
    num_cols = cdiv(N, BLOCK_N)
    tiles = num_rows * num_cols
    chunks = cdiv(tiles, group)
    if pid < send_programs:
        if pid == 0:
            signals.arrive(peers)
        stored = tl.full((), -1, tl.int32)  # the chunk that is stored and not yet published
        for chunk in range(pid, chunks, send_programs):
            for tile in range(chunk * group, tl.minimum((chunk + 1) * group, tiles)):
                row, col = grouped(tile, num_rows, num_cols, GROUP)
                rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
                value, cols, col_mask = partial_tile(
                    x,
                    row * BLOCK_M,
                    rows,
                    rows < M,
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
                    element,
                )
                if stored >= 0:  # Note [Late publish]
                    signals.publish_to_all(peers, stored)
                    stored = tl.full((), -1, tl.int32)
                at = rows.to(tl.int64)[:, None] * N + cols[None, :]
                mask = (rows < M)[:, None] & col_mask[None, :]
                for step in range(1, world + 1):
                    out = signals.slot(peers, (rank + step) % world).to(tl.pointer_type(element))
                    tl.store(tl.multiple_of(out, 16) + to_int64(rank) * M * N + at, value, mask=mask)
            stored = chunk
        if stored >= 0:
            signals.publish_to_all(peers, stored)
    else:
        base = tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(element)), 16)
        for chunk in range(pid - send_programs, chunks, tl.num_programs(0) - send_programs):
            signals.wait_chunk_of_all(peers, chunk)
            for tile in range(chunk * group, tl.minimum((chunk + 1) * group, tiles)):
                row, col = grouped(tile, num_rows, num_cols, GROUP)
                for first in range(row * BLOCK_M, tl.minimum((row + 1) * BLOCK_M, M), PART_M):
                    at, mask, cols = part_of_tile(first, col, M, N, PART_M, BLOCK_N)
                    acc = reduced_tile(base, to_int64(M) * N, at, mask, bias, cols, N, world)
                    tl.store(y + at, narrow(acc, element), mask=mask)
        if pid == send_programs:
            signals.wait_all_arrivals(peers)


@inline
def sums_at(peers, rank, result_at, ELEMENT: tl.constexpr):
    """Where a rank's slot holds the sums of all owners. A hint of alignment before the cast would be lost."""
    out = (signals.slot(peers, rank) + result_at).to(tl.pointer_type(ELEMENT))
    return tl.multiple_of(out, 16)


@triton.jit(do_not_specialize=["group", "send_programs", "reduce_programs"])
def two_shot_kernel(
    peers,
    sizes,  # rows that each rank sums, a tuple, see Note [Odd integers] in signals.py
    x,  # a pointer, or with X_TMA a TMA descriptor
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
    reduce_programs,
    result_at,  # bytes from the slot's begin to the sums; before it the partials
    flags,  # chunk c's sums are announced by flag flags + c
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PART_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr = False,
    X_TMA: tl.constexpr = False,
):
    """A slot holds [W, R_r, N], partials of the own rows, and from result_at on [M, N], the sums of all owners."""
    if signals.failed(peers):
        return
    pid = tl.program_id(0)
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    element: tl.constexpr = y.dtype.element_ty
    num_cols = cdiv(N, BLOCK_N)
    if pid < send_programs:
        push_partials(
            peers,
            sizes,
            1,
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
            element,
        )
    elif pid < send_programs + reduce_programs:
        size, offset = shard(sizes, rank, world)
        num_rows = cdiv(size, BLOCK_M)
        tiles = num_rows * num_cols
        base = tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(element)), 16)
        for chunk in range(pid - send_programs, cdiv(tiles, group), reduce_programs):
            signals.wait_chunk_of_all(peers, chunk)
            for tile in range(chunk * group, tl.minimum((chunk + 1) * group, tiles)):
                row, col = grouped(tile, num_rows, num_cols, GROUP)
                for first in range(row * BLOCK_M, tl.minimum((row + 1) * BLOCK_M, size), PART_M):
                    at, mask, cols = part_of_tile(first, col, size, N, PART_M, BLOCK_N)
                    value = narrow(
                        reduced_tile(base, to_int64(size) * N, at, mask, bias, cols, N, world), element
                    )
                    tl.store(y + to_int64(offset) * N + at, value, mask=mask)
                    for step in range(1, world):
                        out = sums_at(peers, (rank + step) % world, result_at, element) + to_int64(offset) * N
                        tl.store(out + at, value, mask=mask)
            signals.publish_to_all(peers, flags + chunk)
        if pid == send_programs:
            signals.wait_all_arrivals(peers)
    else:
        start = pid - send_programs - reduce_programs
        programs = tl.num_programs(0) - send_programs - reduce_programs
        result = sums_at(peers, rank, result_at, element)
        for step in range(1, world):
            owner = (rank - step + world) % world
            size, offset = shard(sizes, owner, world)
            num_rows = cdiv(size, BLOCK_M)
            tiles = num_rows * num_cols
            for chunk in range(start, cdiv(tiles, group), programs):
                signals.wait(peers, owner, flags + chunk)
                for tile in range(chunk * group, tl.minimum((chunk + 1) * group, tiles)):
                    row, col = grouped(tile, num_rows, num_cols, GROUP)
                    for first in range(row * BLOCK_M, tl.minimum((row + 1) * BLOCK_M, size), PART_M):
                        at, mask, cols = part_of_tile(first, col, size, N, PART_M, BLOCK_N)
                        at += to_int64(offset) * N
                        tl.store(y + at, tl.load(result + at, mask=mask), mask=mask)
