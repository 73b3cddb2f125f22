"""Gradients of ragged groups that are not grouped matmuls themselves: those of the weights, and of a gate.

    dw[e] [N, K]   = dy[rows of e].T @ x[rows of e], zeros for an expert without rows
    dgate, dup     of act(gate) * up, for rows that belong to an expert

The number of tiles of dw does not depend on the offsets; only the length of a tile's sum is known on the device alone.
A fixed number of programs takes tiles in turn, expert by expert, so that an expert with most of the rows keeps all
programs busy. Rows outside an expert are masked: their values, even NaN, have no effect.
"""

import triton
import triton.language as tl

from .matmul import dot_loop, store_tile, tile_of
from .swiglu import store_gate_gradients
from .tiles import cdiv, halves, inline, narrow, to_int64


@inline
def store_part(dw, acc, expert, row, col, N, K, DW_TMA: tl.constexpr):
    """dw[expert, row + i, col + j] = acc, rounded once."""
    if DW_TMA:
        dw.store([expert, row, col], narrow(acc, dw.dtype)[None, :, :])
    else:
        ns = row + tl.arange(0, acc.shape[0])
        ks = col + tl.arange(0, acc.shape[1])
        store_tile(dw + to_int64(expert) * N * K, acc, ns, ks, K, (ns < N)[:, None] & (ks < K)[None, :])


@triton.jit
def grouped_wgrad_kernel(
    dy,
    stride_dm,
    stride_dn,
    x,
    stride_xm,
    stride_xk,
    dw,  # contiguous [E, N, K]; a pointer, or with DW_TMA a descriptor of the block that is stored at once
    offsets,  # int32 [E + 1]
    E,
    R,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr = False,  # finish a tile's columns in two halves, which takes fewer registers
    PRECISION: tl.constexpr = "ieee",
    DW_TMA: tl.constexpr = False,
):
    """dw[e] [N, K] = dy [R, N][rows of e].T @ x [R, K][rows of e], persistent. Offsets are clamped to [0, R]."""
    num_rows = cdiv(N, BLOCK_M)
    num_cols = cdiv(K, BLOCK_N)
    count = num_rows * num_cols
    for item in range(tl.program_id(0), E * count, tl.num_programs(0)):
        expert = item // count
        begin = tl.maximum(0, tl.load(offsets + expert))
        size = tl.minimum(tl.load(offsets + expert + 1), R) - begin
        row, col = tile_of(item % count, num_rows, num_cols, BLOCK_M, BLOCK_N, GROUP)
        ns = row + tl.arange(0, BLOCK_M)
        ks = col + tl.arange(0, BLOCK_N)
        n_mask = (ns < N)[:, None]
        k_mask = (ks < K)[None, :]
        a = dy + to_int64(begin) * stride_dm + (ns.to(tl.int64) * stride_dn)[:, None]
        b = x + to_int64(begin) * stride_xm + (ks.to(tl.int64) * stride_xk)[None, :]
        acc = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
        acc = dot_loop(acc, a, n_mask, stride_dm, b, k_mask, stride_xm, size, BLOCK_K, False, PRECISION)
        if HALVES:
            left, right = halves(acc)
            store_part(dw, left, expert, row, col, N, K, DW_TMA)
            store_part(dw, right, expert, row, col + BLOCK_N // 2, N, K, DW_TMA)
        else:
            store_part(dw, acc, expert, row, col, N, K, DW_TMA)


@triton.jit
def grouped_gated_backward_kernel(dy, gate, up, dgate, dup, offsets, E, R, N, BLOCK: tl.constexpr, ACT: tl.constexpr):
    """dup = dy act(gate); dgate = dy up act'(gate), all contiguous [R, N]; rows from offsets[E] on are not written."""
    count = to_int64(tl.minimum(tl.load(offsets + E), R)) * N
    for block in range(tl.program_id(0), cdiv(count, BLOCK), tl.num_programs(0)):
        at = to_int64(block) * BLOCK + tl.arange(0, BLOCK)
        store_gate_gradients(dy, gate, up, dgate, dup, at, at < count, ACT)
