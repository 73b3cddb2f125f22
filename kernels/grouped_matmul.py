"""Matmuls of ragged groups: the rows of each expert by that expert's own weights, in one launch.

    rows     [R, K]     expert-major: those of expert e are offsets[e] .. offsets[e + 1]
    offsets  [E + 1]    int32, on the device; rows from offsets[E] on are neither read nor written
    weights  [E, N, K]  any strides, so that dgrad is this matmul with weights [E, K, N]
    y        [R, N]

Only the device knows the number of tiles, and the host does not ask: a fixed number of programs walks the experts, and
each program counts tiles by itself. Tiles are dealt to programs in turn, continuing from one expert to the next:

    expert    0 (3 tiles)   1 (none)   2 (5 tiles)          program p takes every P-th tile, of whatever expert;
    program   0  1  2           -      3  0  1  2  3        `dealt` tells how many of an expert's tiles it gets

The walk costs a load and some integer arithmetic per expert, whether it has rows or not. A table of tiles, made by a
kernel before this one, would save that, and cost a launch.

Note [Groups by TMA]: weights [E, N, K] are one matrix [E * N, K], where a tile's columns begin at expert * N. With
ACROSS, as in a backward matmul, they are one matrix [E * K, N], where a tile's blocks of K begin at expert * K. A tile
at the end of an expert's rows or columns also reads some of the next expert's; those products are not stored. A block
of K that reached into the next expert would be added to the sum, so ACROSS requires whole blocks, see
launch/operands.py.
"""

import triton
import triton.language as tl

from .epilogue import add_bias
from .matmul import descriptor_loop, dot_loop, mixed_loop, mixed_pair_loop, pair_loop, store_tile, tile_of
from .swiglu import activated
from .tiles import cdiv, dealt, halves, inline, to_int64


@inline
def first_row(offsets, R):
    """Where the rows of expert 0 begin."""
    return tl.maximum(0, tl.minimum(tl.load(offsets), R))


@inline
def last_row(offsets, expert, begin, R):
    """Where the expert's rows end, clamped to [begin, R]: no address is out of bounds, whatever the offsets are."""
    return tl.maximum(begin, tl.minimum(tl.load(offsets + expert + 1), R))


@inline
def addresses(x, w, strides, expert, rows, cols):
    """(address tile of x[rows], step along K, address tile of w[expert, cols], step along K)."""
    stride_xm, stride_xk, stride_we, stride_wn, stride_wk = strides
    a = x + (rows.to(tl.int64) * stride_xm)[:, None]
    b = w + to_int64(expert) * stride_we + (cols.to(tl.int64) * stride_wn)[None, :]
    return a, stride_xk, b, stride_wk


@inline
def product(
    acc,
    x,
    w,
    strides,
    expert,
    row,
    rows,
    row_mask,
    col,
    N,
    K,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """acc + x[rows] @ w[expert, col + j].T; see Note [Groups by TMA]."""
    cols = col + tl.arange(0, acc.shape[1])
    if TMA:
        if ACROSS:
            at, depth = col, expert * K
        else:
            at, depth = expert * N + col, 0
        if X_TMA:
            acc = descriptor_loop(acc, x, row, w, at, K, BLOCK_K, False, PRECISION, ACROSS, depth)
        else:
            a = x + (rows.to(tl.int64) * strides[0])[:, None]
            acc = mixed_loop(acc, a, row_mask[:, None], strides[1], w, at, K, BLOCK_K, EVEN_K, PRECISION, ACROSS, depth)
    else:
        a, a_step, b, b_step = addresses(x, w, strides, expert, rows, cols)
        acc = dot_loop(acc, a, row_mask[:, None], a_step, b, (cols < N)[None, :], b_step, K, BLOCK_K, EVEN_K, PRECISION)
    return acc


@inline
def either(first, second, part, TMA: tl.constexpr):
    """first for part 0, second for part 1. Descriptors are picked by a branch, addresses are selected."""
    if TMA:
        found = first
        if part == 1:
            found = second
    else:
        found = tl.where(part == 0, first, second)
    return found


@inline
def sum_tile(
    x,
    w,
    x2,
    w2,
    strides,
    expert,
    row,  # the first of `rows`
    rows,
    row_mask,
    col,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """x[rows] @ w[expert, cols].T, plus x2[rows] @ w2[expert, cols].T if there is an x2.

    Both products run in one loop: one after the other, they need more registers than a thread has.
    """
    acc = tl.full((rows.shape[0], BLOCK_N), 0, tl.float32)
    if x2 is None:
        acc = product(
            acc, x, w, strides, expert, row, rows, row_mask, col, N, K, BLOCK_K, EVEN_K, PRECISION, TMA, X_TMA, ACROSS
        )  # fmt: skip
    else:
        for part in range(2):
            left, right = either(x, x2, part, X_TMA), either(w, w2, part, TMA)
            acc = product(
                acc, left, right, strides, expert, row, rows, row_mask, col, N, K, BLOCK_K, EVEN_K, PRECISION, TMA,
                X_TMA, ACROSS,
            )  # fmt: skip
    return acc


@inline
def finish_group(y, acc, bias, expert, rows, row_mask, cols, N):
    """y[rows, cols] = acc + bias[expert, cols], rounded once."""
    if bias is not None:
        acc = add_bias(acc, bias + to_int64(expert) * N, cols, cols < N)
    store_tile(y, acc, rows, cols, N, row_mask[:, None] & (cols < N)[None, :])


@inline
def gated_tile(
    x,
    gate,
    up,
    strides,
    y,
    gate_out,
    up_out,
    expert,
    row,
    x_rows,
    rows,
    row_mask,
    col,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
):
    """y[rows, cols] = act(g) * u, with g and u the two products of x[x_rows]. These are stored too if requested."""
    cols = col + tl.arange(0, BLOCK_N)
    g = tl.full((rows.shape[0], BLOCK_N), 0, tl.float32)
    u = tl.full((rows.shape[0], BLOCK_N), 0, tl.float32)
    if TMA:
        if X_TMA:
            a = x
        else:
            a = x + (x_rows.to(tl.int64) * strides[0])[:, None]
        g, u = mixed_pair_loop(
            g, u, a, row, row_mask[:, None], strides[1], gate, up, expert * N + col, K, BLOCK_K, EVEN_K, PRECISION,
            X_TMA,
        )  # fmt: skip
    else:
        a, a_step, b, step = addresses(x, gate, strides, expert, x_rows, cols)
        _a, _a_step, c, _step = addresses(x, up, strides, expert, x_rows, cols)
        g, u = pair_loop(
            g, u, a, row_mask[:, None], a_step, b, step, c, step, (cols < N)[None, :], K, BLOCK_K, EVEN_K, PRECISION
        )  # fmt: skip
    mask = row_mask[:, None] & (cols < N)[None, :]
    if gate_out is not None:
        store_tile(gate_out, g, rows, cols, N, mask)
        store_tile(up_out, u, rows, cols, N, mask)
    store_tile(y, activated(g, ACT)[0] * u, rows, cols, N, mask)


@inline
def group_tile(
    index,  # int32, the row of x for each row of y; None if it is the same
    x,
    w,
    x2,  # x2 and w2 have the strides of x and w, or are None. Gated: x2 is x, and w and w2 are gate and up
    w2,
    strides,  # (stride_xm, stride_xk, stride_we, stride_wn, stride_wk), for pointers
    bias,
    y,
    gate_out,
    up_out,
    expert,
    row,  # the tile's first row of y
    end,  # of the expert's rows
    col,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HALVES: tl.constexpr,
    ACT: tl.constexpr,  # activation of a gated matmul, else ""
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,  # only without an index
    ACROSS: tl.constexpr,
):
    """Compute one tile of y."""
    rows = row + tl.arange(0, BLOCK_M)
    inside = rows < end
    x_rows = rows
    if index is not None:
        x_rows = tl.load(index + rows, mask=inside, other=0)
    if ACT != "":
        gated_tile(
            x, w, w2, strides, y, gate_out, up_out, expert, row, x_rows, rows, inside, col, N, K, BLOCK_N, BLOCK_K,
            EVEN_K, ACT, PRECISION, TMA, X_TMA,
        )  # fmt: skip
    else:
        acc = sum_tile(
            x, w, x2, w2, strides, expert, row, x_rows, inside, col, N, K, BLOCK_N, BLOCK_K, EVEN_K, PRECISION, TMA,
            X_TMA, ACROSS,
        )  # fmt: skip
        if HALVES:
            left, right = halves(acc)
            first = col + tl.arange(0, BLOCK_N // 2)
            finish_group(y, left, bias, expert, rows, inside, first, N)
            finish_group(y, right, bias, expert, rows, inside, first + BLOCK_N // 2, N)
        else:
            finish_group(y, acc, bias, expert, rows, inside, col + tl.arange(0, BLOCK_N), N)


@inline
def group_tiles(
    x,
    w,
    x2,
    w2,
    strides,
    bias,
    y,
    gate_out,
    up_out,
    offsets,
    E,
    R,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    HALVES: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    ACROSS: tl.constexpr,
):
    """Compute this program's tiles of y. The arguments are those of `group_tile`."""
    num_cols = cdiv(N, BLOCK_N)
    start, programs = tl.program_id(0), tl.num_programs(0)
    end = first_row(offsets, R)
    for expert in range(E):
        begin = end
        end = last_row(offsets, expert, begin, R)
        num_rows = cdiv(end - begin, BLOCK_M)
        for _ in range(dealt(start, num_rows * num_cols, programs)):
            row, col = tile_of(start, num_rows, num_cols, BLOCK_M, BLOCK_N, GROUP)
            group_tile(
                None, x, w, x2, w2, strides, bias, y, gate_out, up_out, expert, begin + row, end, col, N, K, BLOCK_M,
                BLOCK_N, BLOCK_K, EVEN_K, HALVES, ACT, PRECISION, TMA, X_TMA, ACROSS,
            )  # fmt: skip
            start += programs
        start -= num_rows * num_cols


@triton.jit
def grouped_matmul_kernel(
    x,  # pointers, or TMA descriptors: see Note [Groups by TMA]
    w,
    x2,  # x2 and w2: a second product with the same strides, added to the first; or None
    w2,
    strides,  # (stride_xm, stride_xk, stride_we, stride_wn, stride_wk)
    bias,  # contiguous, or None
    y,  # contiguous
    offsets,
    E,
    R,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    HALVES: tl.constexpr = False,  # finish a tile's columns in two halves, which takes fewer registers
    PRECISION: tl.constexpr = "ieee",
    TMA: tl.constexpr = False,
    X_TMA: tl.constexpr = False,
    ACROSS: tl.constexpr = False,
):
    """y [R, N] = x [R, K] @ w[e] [N, K].T + x2 [R, K] @ w2[e] [N, K].T + bias[e] [N], e the expert of each row."""
    group_tiles(
        x, w, x2, w2, strides, bias, y, None, None, offsets, E, R, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, EVEN_K,
        HALVES, "", PRECISION, TMA, X_TMA, ACROSS,
    )  # fmt: skip


@triton.jit
def grouped_gated_kernel(
    x,  # a pointer or TMA descriptor, as are gate and up
    gate,
    up,  # with gate's strides
    strides,  # (stride_xm, stride_xk, stride_ge, stride_gn, stride_gk)
    y,  # contiguous, as are the two products, which are None if not needed
    gate_out,
    up_out,
    offsets,
    E,
    R,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACT: tl.constexpr,
    PRECISION: tl.constexpr = "ieee",
    TMA: tl.constexpr = False,
    X_TMA: tl.constexpr = False,
):
    """y [R, N] = act(x [R, K] @ gate[e] [N, K].T) * (x @ up[e] [N, K].T), e the expert of each row."""
    group_tiles(
        x, gate, x, up, strides, None, y, gate_out, up_out, offsets, E, R, N, K, BLOCK_M, BLOCK_N, BLOCK_K, GROUP,
        EVEN_K, False, ACT, PRECISION, TMA, X_TMA, False,
    )  # fmt: skip
