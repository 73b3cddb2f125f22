"""Matmul of few rows: K is split among programs, which no tile of y could keep busy, and the parts are joined.

    split_matmul_kernel   parts [S, M, N] fp32: part s sums over k from s * k_each on
    join_parts_kernel     y = epilogue(parts[0] + parts[1] + ...), in this order

Two launches and no atomics, so that the sum is the same in every run; S depends on shapes and the machine alone.
"""

import triton
import triton.language as tl

from .epilogue import add_bias, add_residual, scaled
from .matmul import descriptor_loop, linear_tile, store_tile, tile_of
from .swiglu import activated
from .tiles import cdiv, inline, wide


@triton.jit
def split_matmul_kernel(
    x,  # a pointer, or a TMA descriptor as w is
    stride_xm,
    stride_xk,
    w,
    stride_wn,
    stride_wk,
    parts,  # fp32 [splits, M, N]
    M,
    N,
    K,
    k_each,  # a multiple of BLOCK_K; the last part has the rest
    splits,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr = False,
    SPECIALIZED: tl.constexpr = False,
    PRECISION: tl.constexpr = "ieee",
):
    """parts[s] = x[:, k0:k1] @ w[:, k0:k1].T with k0 = s * k_each, k1 = k0 + k_each or K."""
    num_rows = cdiv(M, BLOCK_M)
    num_cols = cdiv(N, BLOCK_N)
    count = num_rows * num_cols
    for item in range(tl.program_id(0), count * splits, tl.num_programs(0)):
        row, col = tile_of(item % count, num_rows, num_cols, BLOCK_M, BLOCK_N, GROUP)
        part = item // count
        begin = part * k_each
        end = tl.minimum(begin + k_each, K)
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        if TMA:
            acc = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
            acc = descriptor_loop(acc, x, row, w, col, begin, end, BLOCK_K, SPECIALIZED, PRECISION)
        else:
            acc = linear_tile(
                x + wide(begin) * stride_xk,
                rows,
                rows < M,
                stride_xm,
                stride_xk,
                w + wide(begin) * stride_wk,
                cols,
                cols < N,
                stride_wn,
                stride_wk,
                end - begin,
                BLOCK_K,
                EVEN_K,
                PRECISION,
            )
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        store_tile(parts + wide(part) * M * N, acc, rows, cols, N, mask)


@inline
def sum_of_parts(parts, splits, at, each, mask):
    """parts[0] + parts[1] + ... at these places, in this order; a part has `each` elements."""
    total = tl.load(parts + at, mask=mask, other=0.0)
    for part in range(1, splits):
        total += tl.load(parts + wide(part) * each + at, mask=mask, other=0.0)
    return total


@triton.jit
def join_parts_kernel(
    parts,  # fp32 [splits, M, N]
    up_parts,  # of a gated matmul, or None
    splits,
    bias,
    up_bias,
    y,  # contiguous, as are the two sums; those are None where nobody wants them
    gate_out,
    up_out,
    M,
    N,
    scale,
    x_scale,
    stride_xs,
    w_scale,
    stride_ws,
    residual,
    stride_rm,
    stride_rn,
    up_scale,  # of up_parts; x_scale is of the rows of both
    stride_us,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ACT: tl.constexpr,
):
    """y [M, N] of the sums over parts: as matmul_kernel ends, or with up_parts as gated_matmul_kernel does."""
    across = cdiv(N, COLS)
    rows = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) % across * COLS + tl.arange(0, COLS)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    acc = sum_of_parts(parts, splits, at, wide(M) * N, mask)
    acc = scaled(acc, scale, x_scale, stride_xs, rows, rows < M, w_scale, stride_ws, cols, cols < N)
    acc = add_bias(acc, bias, cols, cols < N)
    if up_parts is not None:
        up = sum_of_parts(up_parts, splits, at, wide(M) * N, mask)
        up = scaled(up, None, x_scale, stride_xs, rows, rows < M, up_scale, stride_us, cols, cols < N)
        up = add_bias(up, up_bias, cols, cols < N)
        if gate_out is not None:
            store_tile(gate_out, acc, rows, cols, N, mask)
            store_tile(up_out, up, rows, cols, N, mask)
        acc = activated(acc, ACT)[0] * up
    acc = add_residual(acc, residual, stride_rm, stride_rn, rows, cols, mask)
    store_tile(y, acc, rows, cols, N, mask)
