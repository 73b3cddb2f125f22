"""The matmul inside every fused kernel, and the plain persistent one.

All kernels here compute y = x @ w.T tile by tile, in fp32, by one of these loops over K:

    dot_loop         pointer loads with any strides and alignment; tails in all three dimensions are masked
    pair_loop        the same with two weights: each block of x is loaded once
    descriptor_loop  TMA (sm_90 and later) of row-major operands; elements outside of them read as zero
    mixed_loop       x by pointers, w by TMA
    mixed_pair_loop  two weights by TMA, x by either

A weight [N, K] loaded by TMA may also be the transpose of a row-major one (ACROSS), as in its layer's backward.

No loop contains a wait (Note [Waits stand in outer loops] in signals.py), so the compiler pipelines it. TMA may read
data that peers write during a kernel only after a proxy fence (Note [Generic proxy] in signals.py). So TMA loads:

    matmul                             x and w
    matmul reduce-scatter, all-reduce  x and w: only partial tiles are exchanged, and no loop here reads them. x by
                                       pointers if a rank's rows are several runs (batch > 1): its tiles are then not
                                       rectangles
    all-gather matmul                  w; x by pointers, because peers push all but this rank's shard
    all-gather wgrad                   dy, in a separate loop; x by pointers
    grouped matmul                     x and w
    dispatch and matmul                w; x by pointers, because peers push it and an index selects its rows
    matmul and combine                 x and w

Operands that TMA does not support are loaded by pointers, see ops/launch/operands.py; so are all operands before sm_90
and on AMD.

Note [One loop over tiles and K]: `tl.range(..., flatten=True)` over tiles merges both loops, so that a tile's first
blocks are in flight while the previous tile ends; y is stored by TMA, half a tile at a time. The gain is largest for
short K; `fusedtp bench matmul` measures the kernel. Kernels that wait or publish between tiles cannot use it.

Note [Warp specialisation]: `tl.range(..., warp_specialize=True)` on the loop over K dedicates a warp to the copies, and
on sm_100 another to tcgen05. Results of compiling bf16 tiles of 128 rows with Triton 3.6.0, 3.7.1 and 3.9.0:
  sm_100  all three specialise the loop (`ttg.warp_specialize` in TTGIR), without spills. On the outer loop over tiles
          3.6 fails ("NVWSInsertAref") and 3.7 leaves several regions, so it is set on the inner loop.
  sm_90   with 8 warps all three ignore it; with 4 warps 3.6 obeys, but 3.7 and 3.9 fail ("NVGPUWarpSpecialization":
          a descriptor's block and tensor differ). So it is off there.
The fused kernels do not use it: that has not been tried. Its gain has not been measured on a GPU yet. TMA alone gains 1
to 2 percent on an H100: pointer loads with asynchronous copies keep up.
"""

import triton
import triton.language as tl

from .epilogue import add_bias, scaled
from .tiles import cdiv, grouped, halves, inline, narrow, to_int64, widen

IEEE = tl.constexpr("ieee")  # for defaults of device functions: Triton 3.6 does not accept a plain string there


@inline
def multiply_add(acc, x, w, PRECISION: tl.constexpr):
    """acc + x [BLOCK_M, BLOCK_K] @ w [BLOCK_K, BLOCK_N].

    PRECISION   of fp32 operands: "ieee" or "tf32"
    Hopper sums fp8 products in 22 bits (DeepSeek-V3, section 3.3.2), so each block of K is added in fp32. On Hopper
    Triton keeps this addition separate from the product, elsewhere it fuses them. max_num_imprecise_acc should do the
    same, but with it Triton 3.9 adds results before it waits for wgmma, which PTX leaves undefined.
    """
    x = widen(x)
    if x.dtype.is_fp8():
        acc += tl.dot(x, w, input_precision=PRECISION)
    else:
        acc = tl.dot(x, widen(w), acc, input_precision=PRECISION)
    return acc


@inline
def dot_loop(
    acc,
    a,  # address tile of rows: [BLOCK_M, 1], with the k-th element of a row at k * a_step
    a_mask,
    a_step,
    b,  # address tile of columns: [1, BLOCK_N]
    b_mask,
    b_step,
    K,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr = IEEE,
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
        acc = multiply_add(acc, x, w, PRECISION)
        a_tile += to_int64(BLOCK_K) * a_step
        b_tile += to_int64(BLOCK_K) * b_step
    return acc


@inline
def pair_loop(
    first,
    second,
    a,  # address tiles as in dot_loop: rows [BLOCK_M, 1], and columns [1, BLOCK_N] of two weights
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
        a_tile += to_int64(BLOCK_K) * a_step
        b_tile += to_int64(BLOCK_K) * b_step
        c_tile += to_int64(BLOCK_K) * c_step
    return first, second


@inline
def descriptor_loop(
    acc,
    x,  # descriptors of [M, K] and [N, K] with blocks [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K]
    row,
    w,
    col,
    K,
    BLOCK_K: tl.constexpr,
    SPECIALIZED: tl.constexpr,
    PRECISION: tl.constexpr,
    ACROSS: tl.constexpr = False,
    depth=0,
):
    """acc + sum over k < K of x[row + i, k] w[col + j, depth + k]; ACROSS: see column_block."""
    for k in tl.range(0, K, BLOCK_K, warp_specialize=SPECIALIZED):
        acc = multiply_add(acc, x.load([row, k]), column_block(w, col, depth + k, ACROSS), PRECISION)
    return acc


@inline
def column_block(w, col, k, ACROSS: tl.constexpr):
    """[BLOCK_K, BLOCK_N] of w, by a descriptor of [N, K], or with ACROSS of [K, N]."""
    if ACROSS:
        block = w.load([k, col])
    else:
        block = w.load([col, k]).T
    return block


@inline
def mixed_loop(
    acc,
    a,  # address tile of rows, as in dot_loop
    a_mask,
    a_step,
    w,  # descriptor of [N, K] with blocks [BLOCK_N, BLOCK_K]
    col,
    K,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr = IEEE,
    ACROSS: tl.constexpr = False,
    depth=0,
):
    """acc [BLOCK_M, BLOCK_N] + sum over k < K of a[:, k] w[col + j, depth + k]. EVEN_K: BLOCK_K divides K."""
    ks = tl.arange(0, BLOCK_K)
    a_tile = a + ks[None, :].to(tl.int64) * a_step
    for k in range(0, K, BLOCK_K):
        if EVEN_K:
            mask = a_mask
        else:
            mask = a_mask & (k + ks < K)[None, :]
        acc = multiply_add(
            acc, tl.load(a_tile, mask=mask, other=0.0), column_block(w, col, depth + k, ACROSS), PRECISION
        )
        a_tile += to_int64(BLOCK_K) * a_step
    return acc


@inline
def mixed_pair_loop(
    first,
    second,
    x,  # a descriptor, with rows from `row` on; or an address tile, like `a` in dot_loop
    row,
    a_mask,
    a_step,
    gate,  # descriptors of [N, K] with blocks [BLOCK_N, BLOCK_K]
    up,
    col,
    K,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    X_TMA: tl.constexpr,
):
    """(first + x @ gate[col + j].T, second + x @ up[col + j].T), each block of x loaded once."""
    ks = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        if X_TMA:
            block = x.load([row, k])
        else:
            mask = a_mask
            if not EVEN_K:
                mask = a_mask & (k + ks < K)[None, :]
            block = tl.load(x + (k + ks)[None, :].to(tl.int64) * a_step, mask=mask, other=0.0)
        first = multiply_add(first, block, column_block(gate, col, k, False), PRECISION)
        second = multiply_add(second, block, column_block(up, col, k, False), PRECISION)
    return first, second


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
    PRECISION: tl.constexpr = IEEE,
):
    """x[rows] @ w[cols].T in fp32."""
    acc = tl.full((rows.shape[0], cols.shape[0]), 0, tl.float32)
    a = x + (rows.to(tl.int64) * stride_xm)[:, None]
    b = w + (cols.to(tl.int64) * stride_wn)[None, :]
    return dot_loop(
        acc, a, row_mask[:, None], stride_xk, b, col_mask[None, :], stride_wk, K, BLOCK_K, EVEN_K, PRECISION
    )


@inline
def mixed_tile(
    x,
    rows,
    row_mask,
    stride_xm,
    stride_xk,
    w,
    col,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr = IEEE,
    ACROSS: tl.constexpr = False,
):
    """x[rows] @ w[col:col + BLOCK_N].T in fp32; w is a descriptor of [N, K], or with ACROSS of [K, N]."""
    acc = tl.full((rows.shape[0], BLOCK_N), 0, tl.float32)
    a = x + (rows.to(tl.int64) * stride_xm)[:, None]
    return mixed_loop(acc, a, row_mask[:, None], stride_xk, w, col, K, BLOCK_K, EVEN_K, PRECISION, ACROSS)


@inline
def tile_of(tile, num_rows, num_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(first row, first column) of a tile; there are num_rows * num_cols tiles."""
    row, col = grouped(tile, num_rows, num_cols, GROUP)
    return row * BLOCK_M, col * BLOCK_N


@inline
def store_tile(y, acc, rows, cols, N, mask):
    """y[rows, cols] = acc, rounded once; y is contiguous [M, N]."""
    at = rows.to(tl.int64)[:, None] * N + cols[None, :]
    tl.store(y + at, narrow(acc, y.dtype.element_ty), mask=mask)


@inline
def finish(y, acc, row, col, M, N, more, Y_TMA: tl.constexpr):
    """y[row + i, col + j] = x_scale * w_scale * acc + bias, rounded once."""
    x_scale, stride_xs, w_scale, stride_ws, bias = more
    rows = row + tl.arange(0, acc.shape[0])
    cols = col + tl.arange(0, acc.shape[1])
    acc = scaled(acc, x_scale, stride_xs, rows, rows < M, w_scale, stride_ws, cols, cols < N)
    acc = add_bias(acc, bias, cols, cols < N)
    if Y_TMA:
        y.store([row, col], narrow(acc, y.dtype))
    else:
        store_tile(y, acc, rows, cols, N, (rows < M)[:, None] & (cols < N)[None, :])


@triton.jit
def matmul_kernel(
    x,  # a pointer or TMA descriptor, as is w
    stride_xm,
    stride_xk,
    w,
    stride_wn,
    stride_wk,
    bias,
    y,  # contiguous; a pointer, or with FLAT a descriptor of the block that is stored at once
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    x_scale=None,  # fp32, one per row, or one for all with stride 0
    stride_xs=0,
    w_scale=None,
    stride_ws=0,
    TMA: tl.constexpr = False,
    SPECIALIZED: tl.constexpr = False,
    HALVES: tl.constexpr = False,  # finish a tile's columns in two halves, which takes fewer registers
    FLAT: tl.constexpr = False,  # with TMA: see Note [One loop over tiles and K]
    PRECISION: tl.constexpr = "ieee",
):
    """y [M, N] = x_scale * w_scale * (x [M, K] @ w [N, K].T) + bias [N], persistent: any number of programs."""
    num_rows = cdiv(M, BLOCK_M)
    num_cols = cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_rows * num_cols, tl.num_programs(0), flatten=FLAT):
        row, col = tile_of(tile, num_rows, num_cols, BLOCK_M, BLOCK_N, GROUP)
        if TMA:
            acc = tl.full((BLOCK_M, BLOCK_N), 0, tl.float32)
            acc = descriptor_loop(acc, x, row, w, col, K, BLOCK_K, SPECIALIZED, PRECISION)
        else:
            rows = row + tl.arange(0, BLOCK_M)
            cols = col + tl.arange(0, BLOCK_N)
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
                PRECISION,
            )
        more = (x_scale, stride_xs, w_scale, stride_ws, bias)
        if HALVES:
            left, right = halves(acc)
            finish(y, left, row, col, M, N, more, FLAT)
            finish(y, right, row, col + BLOCK_N // 2, M, N, more, FLAT)
        else:
            finish(y, acc, row, col, M, N, more, FLAT)
