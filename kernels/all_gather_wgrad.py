"""dw_i = dy_i.T @ all_gather(x) for several weights, one gather, in one launch.

    x_r      [R_r, K]   rows of rank r, as in all_gather_matmul.py
    dy_i     [T, N_i]   all rows, in global order
    dw_i     [N_i, K]

The sum runs over the rows, and the rows arrive shard by shard. So the waits are along the reduction axis: a program
keeps its tile's sum in registers and walks the shards in the order rank, rank - 1, .... It waits for each shard at its
first tile only; a shard that has arrived stays. Senders are those of all_gather_matmul, or copies beside the kernel, as
there.

The order of the shards differs from rank to rank, never from run to run.
"""

import triton
import triton.language as tl

from . import signals
from .all_gather_matmul import begin_gather, pick_weight, shard_source, wait_rows
from .matmul import IEEE, dot_loop, multiply_add
from .tiles import cdiv, grouped, inline, narrow, shard, to_int64


@inline
def gradient_loop(acc, dy, first, col, x, x_mask, stride_m, size, BLOCK_K: tl.constexpr):
    """acc + sum over t < size of dy[first + t, col + i] x[t], with dy by its descriptor and x as in dot_loop.

    BLOCK_K divides size. Otherwise rows of dy past the shard would be multiplied by zeros, and 0 * NaN is NaN.
    """
    ts = tl.arange(0, BLOCK_K)
    x_tile = x + ts[:, None].to(tl.int64) * stride_m
    for block in range(size // BLOCK_K):
        rows = tl.load(x_tile, mask=x_mask, other=0.0)
        acc = multiply_add(acc, dy.load([first + block * BLOCK_K, col]).T, rows, IEEE)
        x_tile += to_int64(BLOCK_K) * stride_m
    return acc


@inline
def shard_sum(
    acc,
    dy,  # address tile [BLOCK_M, 1] of the tile's columns of dy, at row 0; or with TMA its descriptor
    col,  # the first of these columns, for TMA
    dy_mask,
    stride_dt,
    x,  # address tile [1, BLOCK_N] of the tile's columns of the shard, at row 0
    x_mask,
    stride_m,
    size,
    offset,
    total,
    batch,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """acc + the products of one shard's rows, which are `size` consecutive rows for each batch entry."""
    if TMA:
        acc = gradient_loop(acc, dy, offset, col, x, x_mask, stride_m, size, BLOCK_K)
    else:
        for b in range(batch):
            dy_rows = dy + (to_int64(total) * b + offset) * stride_dt
            x_rows = x + to_int64(size) * b * stride_m
            acc = dot_loop(acc, dy_rows, dy_mask, stride_dt, x_rows, x_mask, stride_m, size, BLOCK_K, EVEN_K)
    return acc


@triton.jit(do_not_specialize=["chunk_rows", "send_programs"])
def all_gather_wgrad_kernel(
    peers,
    sizes,  # tuple of world_size, see Note [Odd integers] in signals.py
    batch,
    x,
    stride_xm,
    stride_xk,
    K,
    grads,  # from here on tuples, one entry per weight
    widths,
    strides_dn,
    strides_dt,
    nothing,  # one None per weight: there are no biases
    outputs,  # contiguous
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
    descriptor0=None,  # with TMA: of the dys [T, N_i]; then EVEN_K is true and batch is 1, else sm_90 spills
    descriptor1=None,
    descriptor2=None,
    descriptor3=None,
    TMA: tl.constexpr = False,
):
    if signals.failed(peers):
        return
    begin_gather(peers, sizes, batch, x, stride_xm, stride_xk, K, chunk_rows, send_programs, COPY_M, COPY_K)
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    if TMA:
        operands = (descriptor0, descriptor1, descriptor2, descriptor3)
    else:
        operands = grads
    last_shard, total = shard(sizes, world - 1, world)
    total += last_shard
    num_rows = tl.full((), 0, tl.int32)
    for i in tl.static_range(NUM_WEIGHTS):
        num_rows += cdiv(widths[i], BLOCK_M)
    num_cols = cdiv(K, BLOCK_N)
    if tl.program_id(0) == 0:  # at the start, because every tile needs the rows of all ranks anyway
        signals.wait_all_arrivals(peers)
    had = tl.full((), 0, tl.int32)  # tiles finished; only the first waits for rows
    ticket = signals.take(peers, signals.TILE)
    while ticket < num_rows * num_cols:
        row, col = grouped(ticket, num_rows, num_cols, GROUP)
        grad, row, width, stride_dn, stride_dt, _bias, _has_bias, out = pick_weight(
            row, operands, widths, strides_dn, strides_dt, nothing, outputs, NUM_WEIGHTS, BLOCK_M, TMA
        )
        ns = row * BLOCK_M + tl.arange(0, BLOCK_M)
        ks = col * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = (ns < width)[:, None]
        k_mask = (ks < K)[None, :]
        if TMA:
            dy = grad
        else:
            dy = grad + (ns.to(tl.int64) * stride_dn)[:, None]
        acc = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
        for step in range(world):
            src = (rank - step + world) % world
            size, offset = shard(sizes, src, world)
            if src != rank:
                if had == 0:
                    wait_rows(peers, src, 0, size * batch, chunk_rows)
            base, stride_m, stride_k = shard_source(peers, src, offset, batch, x, stride_xm, stride_xk, K, ALIGNED)
            rows = base + (ks.to(tl.int64) * stride_k)[None, :]
            acc = shard_sum(
                acc,
                dy,
                row * BLOCK_M,
                n_mask,
                stride_dt,
                rows,
                k_mask,
                stride_m,
                size,
                offset,
                total,
                batch,
                BLOCK_K,
                EVEN_K,
                TMA,
            )
        at = out + ns.to(tl.int64)[:, None] * K + ks[None, :]
        tl.store(at, narrow(acc, out.dtype.element_ty), mask=n_mask & k_mask)
        had += 1
        ticket = signals.take(peers, signals.TILE)
    signals.leave(peers)
