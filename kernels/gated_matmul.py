"""Gate and up projection of an MLP with their product: two sums in one pass over x, joined before they are rounded.

    y = activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias)

Of fp8 operands either product is scaled first, by what its rows and its columns are worth.

Beside two matmuls and an elementwise kernel it reads x once, and writes and reads neither of the two products.
"""

import triton
import triton.language as tl

from .epilogue import add_bias, scaled
from .matmul import multiply_add, store_tile, tile_of
from .swiglu import activated
from .tiles import cdiv, inline, wide


@inline
def pair_loop(
    first,
    second,
    a,  # address tiles as those of dot_loop: rows [BLOCK_M, 1] and columns [1, BLOCK_N] of two weights
    a_mask,
    a_step,
    b,
    b_step,
    c,
    c_step,
    col_mask,
    K,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """(first + a @ b, second + a @ c), each block of a loaded once."""
    ks = tl.arange(0, BLOCK_K)
    a_tile = a + ks[None, :].to(tl.int64) * a_step
    b_tile = b + ks[:, None].to(tl.int64) * b_step
    c_tile = c + ks[:, None].to(tl.int64) * c_step
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            row_mask, mask = a_mask, col_mask
        else:
            inside = k + ks < K
            row_mask, mask = a_mask & inside[None, :], col_mask & inside[:, None]
        x = tl.load(a_tile, mask=row_mask, other=0.0)
        first = multiply_add(first, x, tl.load(b_tile, mask=mask, other=0.0), PRECISION)
        second = multiply_add(second, x, tl.load(c_tile, mask=mask, other=0.0), PRECISION)
        a_tile += wide(BLOCK_K) * a_step
        b_tile += wide(BLOCK_K) * b_step
        c_tile += wide(BLOCK_K) * c_step
    return first, second


@inline
def pair_by_descriptor(
    first,
    second,
    x,
    row,
    gate,
    up,
    col,
    K,
    BLOCK_K: tl.constexpr,
    SPECIALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As pair_loop, by TMA."""
    for k in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALIZED):
        tile = x.load([row, k])
        first = multiply_add(first, tile, gate.load([col, k]).T, PRECISION)
        second = multiply_add(second, tile, up.load([col, k]).T, PRECISION)
    return first, second


@triton.jit
def gated_matmul_kernel(
    x,  # a pointer, or a TMA descriptor as gate and up are
    stride_xm,
    stride_xk,
    gate,
    stride_gn,
    stride_gk,
    gate_bias,
    up,
    stride_un,
    stride_uk,
    up_bias,
    y,  # contiguous, as are the two products; those are None where nobody wants them
    gate_out,
    up_out,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACT: tl.constexpr,
    x_scale=None,  # fp32 of each row, or of all with stride 0
    stride_xs=0,
    gate_scale=None,
    stride_gs=0,
    up_scale=None,
    stride_us=0,
    TMA: tl.constexpr = False,
    SPECIALIZED: tl.constexpr = False,
    PRECISION: tl.constexpr = "ieee",
):
    """y [M, N] = act(x [M, K] @ gate [N, K].T + gate_bias [N]) * (x @ up [N, K].T + up_bias [N]), persistent."""
    num_rows = cdiv(M, BLOCK_M)
    num_cols = cdiv(N, BLOCK_N)
    for tile in range(tl.program_id(0), num_rows * num_cols, tl.num_programs(0)):
        row, col = tile_of(tile, num_rows, num_cols, BLOCK_M, BLOCK_N, GROUP)
        rows = row + tl.arange(0, BLOCK_M)
        cols = col + tl.arange(0, BLOCK_N)
        g = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
        u = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
        if TMA:
            g, u = pair_by_descriptor(g, u, x, row, gate, up, col, K, BLOCK_K, SPECIALIZED, PRECISION)
        else:
            a = x + (rows.to(tl.int64) * stride_xm)[:, None]
            b = gate + (cols.to(tl.int64) * stride_gn)[None, :]
            c = up + (cols.to(tl.int64) * stride_un)[None, :]
            g, u = pair_loop(
                g,
                u,
                a,
                (rows < M)[:, None],
                stride_xk,
                b,
                stride_gk,
                c,
                stride_uk,
                (cols < N)[None, :],
                K,
                BLOCK_K,
                EVEN_K,
                PRECISION,
            )
        g = scaled(g, None, x_scale, stride_xs, rows, rows < M, gate_scale, stride_gs, cols, cols < N)
        g = add_bias(g, gate_bias, cols, cols < N)
        u = scaled(u, None, x_scale, stride_xs, rows, rows < M, up_scale, stride_us, cols, cols < N)
        u = add_bias(u, up_bias, cols, cols < N)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        if gate_out is not None:
            store_tile(gate_out, g, rows, cols, N, mask)
            store_tile(up_out, u, rows, cols, N, mask)
        store_tile(y, activated(g, ACT)[0] * u, rows, cols, N, mask)
