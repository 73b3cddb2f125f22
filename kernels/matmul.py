"""The matmul inside every fused kernel, and the plain persistent one.

All kernels here compute y = x @ w.T tile by tile through `dot_loop`: pointer loads of any strides, tails in all
three directions masked, fp32 accumulation, fp32 operands multiplied in full precision. The loop holds no wait
(Note [Waits stand in outer loops] in signals.py), so the compiler pipelines it.
"""

import triton
import triton.language as tl

from .tiles import cdiv, grouped, inline, narrow, wide, widen


@inline
def dot_loop(
    acc,
    a,  # address tile of rows: [BLOCK_M, 1], the k-th element of a row is k * a_step further
    a_mask,
    a_step,
    b,  # address tile of columns: [1, BLOCK_N]
    b_mask,
    b_step,
    K,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """acc [BLOCK_M, BLOCK_N] + sum over k < K of a[:, k] b[k, :]. EVEN_K: BLOCK_K divides K."""
    ks = tl.arange(0, BLOCK_K)
    a_tile = a + ks[None, :].to(tl.int64) * a_step
    b_tile = b + ks[:, None].to(tl.int64) * b_step
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(a_tile, mask=a_mask, other=0.0)
            w = tl.load(b_tile, mask=b_mask, other=0.0)
        else:
            inside = k + ks < K
            x = tl.load(a_tile, mask=a_mask & inside[None, :], other=0.0)
            w = tl.load(b_tile, mask=b_mask & inside[:, None], other=0.0)
        acc = tl.dot(widen(x), widen(w), acc, input_precision="ieee")
        a_tile += wide(BLOCK_K) * a_step
        b_tile += wide(BLOCK_K) * b_step
    return acc


@inline
def linear_tile(
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
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """x[rows] @ w[cols].T in fp32."""
    acc = tl.full((rows.shape[0], cols.shape[0]), 0, tl.float32)
    a = x + (rows.to(tl.int64) * stride_xm)[:, None]
    b = w + (cols.to(tl.int64) * stride_wn)[None, :]
    return dot_loop(acc, a, row_mask[:, None], stride_xk, b, col_mask[None, :], stride_wk, K, BLOCK_K, EVEN_K)


@inline
def add_bias(acc, bias, cols, col_mask):
    """acc + bias[cols]; no bias is None."""
    if bias is not None:
        acc += widen(tl.load(bias + cols, mask=col_mask, other=0.0)).to(tl.float32)[None, :]
    return acc


@triton.jit
def matmul_kernel(
    x,
    stride_xm,
    stride_xk,
    w,
    stride_wn,
    stride_wk,
    bias,
    y,  # contiguous
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """y [M, N] = x [M, K] @ w [N, K].T + bias [N], persistent: any number of programs walks all tiles."""
    num_rows = cdiv(M, BLOCK_M)
    num_cols = cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), num_rows * num_cols, tl.num_programs(0)):
        row, col = grouped(tile, num_rows, num_cols, GROUP)
        rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = col * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = linear_tile(
            x,
            rows,
            rows < M,
            stride_xm,
            stride_xk,
            w,
            cols,
            cols < N,
            stride_wn,
            stride_wk,
            K,
            BLOCK_K,
            EVEN_K,
        )
        acc = add_bias(acc, bias, cols, cols < N)
        out = y + rows.to(tl.int64)[:, None] * N + cols[None, :]
        tl.store(out, narrow(acc, y.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])
