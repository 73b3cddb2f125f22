"""y = act(all_gather(x) @ gate.T + b_gate) * (all_gather(x) @ up.T + b_up) in one launch: half a gated MLP.

    x_r       [R_r, K]   rows of rank r: R_r = batch * size_r
    gate, up  [N, K]     with the same layout
    y         [T, N]     T = sum of R_r, rows in global order

Rows are sent and awaited as in all_gather_matmul.py. A tile has the same columns of gate and up: both products
accumulate from the same blocks of x, the activation is applied to the fp32 sums, and y is rounded once. The products
are stored too if a backward pass will need them.
"""

import triton
import triton.language as tl

from . import signals
from .all_gather_matmul import begin_gather, shard_source, wait_rows
from .epilogue import add_bias
from .matmul import IEEE, pair_loop, store_tile
from .swiglu import activated
from .tiles import cdiv, copy_rows, grouped, shard, tile_rows


@triton.jit(do_not_specialize=["chunk_rows", "send_programs"])
def all_gather_gated_matmul_kernel(
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
    chunk_rows,
    send_programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COPY_M: tl.constexpr,
    COPY_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    ALIGNED: tl.constexpr,
    ACT: tl.constexpr,
):
    if signals.failed(peers):
        return
    begin_gather(peers, sizes, batch, x, stride_xm, stride_xk, K, chunk_rows, send_programs, COPY_M, COPY_K)
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    last_shard, total = shard(sizes, world - 1, world)
    total += last_shard
    num_cols = cdiv(N, BLOCK_N)
    if gathered is not None:
        num_cols = tl.maximum(num_cols, 1)  # the first column of tiles also keeps the rows
    done = tl.full((), 0, tl.int32)  # tiles of earlier shards
    ticket = signals.take(peers, signals.TILE)
    for step in range(world):
        src = (rank - step + world) % world
        size, offset = shard(sizes, src, world)
        num_rows = cdiv(size * batch, BLOCK_M)
        base, stride_m, stride_k = shard_source(peers, src, offset, batch, x, stride_xm, stride_xk, K, ALIGNED)
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
                    at = tile_rows(rows, size, offset, total, batch, last)
                    copy_rows(
                        base, rows.to(tl.int64), stride_m, stride_k, gathered, at, K, inside, K, BLOCK_K
                    )  # fmt: skip
            cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
            wide_cols = cols.to(tl.int64) * stride_wn
            g = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
            u = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
            g, u = pair_loop(
                g, u, base + (rows.to(tl.int64) * stride_m)[:, None], inside[:, None], stride_k,
                gate + wide_cols[None, :], stride_wk, up + wide_cols[None, :], stride_wk, (cols < N)[None, :],
                K, BLOCK_K, EVEN_K, IEEE,
            )  # fmt: skip
            g = add_bias(g, gate_bias, cols, cols < N)
            u = add_bias(u, up_bias, cols, cols < N)
            # not before the loop, where they would occupy registers
            out_rows = tile_rows(rows, size, offset, total, batch, last)
            mask = inside[:, None] & (cols < N)[None, :]
            if gate_out is not None:
                store_tile(gate_out, g, out_rows, cols, N, mask)
                store_tile(up_out, u, out_rows, cols, N, mask)
            store_tile(y, activated(g, ACT)[0] * u, out_rows, cols, N, mask)
            ticket = signals.take(peers, signals.TILE)
        done += num_rows * num_cols
    if tl.program_id(0) == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)
