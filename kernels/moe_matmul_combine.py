"""The last matmul of a mixture of experts and its combine in one launch: rows travel home as their tiles get done.

    h     [R, K]       this rank's rows, expert-major, as grouped_matmul.py has them
    w     [E, N, K]    of this rank's experts
    out   [T_r, N]     sum over a token's choices of weight * (h[row] @ w[e].T), as moe_exchange.py has it

or, of a gated MLP's two gradients on their way back, of (h[row] @ w[e].T + h2[row] @ w2[e].T), without weights.

A tile's epilogue stores each row where it belongs: in the slot of the rank whose token it is, where the choice stands
in that rank's order. The first part of all columns comes before the second. For a token's choices are spread over all
experts and owners: by rows no sum could begin before nearly all are done; by columns a quarter of every sum can begin
after a quarter of the products. One rank, time to the right:

    send       part 0 of experts 0, 1, 2, ...      part 1 of experts 0, 1, 2, ...      ...
    sum                                            waits for part 0 of all, sums it    waits for part 1 ...

Programs 0 .. S-1 multiply and send, and never wait; the others sum: one resident program a rank is enough. Flag p of a
rank is part p of all that it sends: Note [One flag of many programs] in signals.py.

Tiles and sums are those of the two kernels one after another, and the product is rounded to its dtype before it
travels: so the results are the same bits.

Programs that sum stand beside the matmul, and take processors from it. Its time on a GPU is not known yet.
Source: the cut by columns is COMET's, Zhang et al. 2025 (arXiv 2502.19811), section 3.1.
"""

import triton
import triton.language as tl

from . import signals
from .grouped_matmul import first_row, last_row, sum_tile
from .moe_exchange import overflows, sum_choices
from .tiles import cdiv, dealt, halves, inline, narrow


@inline
def row_addresses(peers, to, at, rows, inside, N, ELEMENT: tl.constexpr):
    """Address of the first element of each row's place in the slot of its token's rank."""
    rank = tl.load(to + rows, mask=inside, other=0)
    place = tl.load(at + rows, mask=inside, other=0).to(tl.int64)
    return tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(ELEMENT)), 16) + place * N


@inline
def send_tile(home, acc, inside, cols, N, ELEMENT: tl.constexpr):
    """Columns of rows to their row_addresses, rounded once."""
    mask = inside[:, None] & (cols < N)[None, :]
    tl.store(home[:, None] + cols[None, :], narrow(acc, ELEMENT), mask=mask)


@inline
def multiply_and_send(
    peers,
    x,
    w,
    x2,
    w2,
    strides,
    offsets,
    to,
    at,
    E,
    R,
    N,
    K,
    part_tiles,
    programs,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    HALVES: tl.constexpr,
    PRECISION: tl.constexpr,
    TMA: tl.constexpr,
    X_TMA: tl.constexpr,
    ACROSS: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Send stage: every `programs`-th tile, part by part, expert by expert."""
    start = tl.program_id(0)
    if start == 0:
        signals.arrive(peers)
    num_cols = cdiv(N, BLOCK_N)
    for part in range(cdiv(num_cols, part_tiles)):
        first_col = part * part_tiles
        width = tl.minimum(part_tiles, num_cols - first_col)
        end = first_row(offsets, R)
        for expert in range(E):
            begin = end
            end = last_row(offsets, expert, begin, R)
            blocks = cdiv(end - begin, BLOCK_M)
            for _ in range(dealt(start, blocks * width, programs)):
                row = begin + start // width * BLOCK_M
                col = (first_col + start % width) * BLOCK_N
                rows = row + tl.arange(0, BLOCK_M)
                inside = rows < end
                acc = sum_tile(
                    x, w, x2, w2, strides, expert, row, rows, inside, col, N, K, BLOCK_N, BLOCK_K, EVEN_K, PRECISION,
                    TMA, X_TMA, ACROSS,
                )  # fmt: skip
                home = row_addresses(peers, to, at, rows, inside, N, ELEMENT)
                if HALVES:
                    left, right = halves(acc)
                    half = col + tl.arange(0, BLOCK_N // 2)
                    send_tile(home, left, inside, half, N, ELEMENT)
                    send_tile(home, right, inside, half + BLOCK_N // 2, N, ELEMENT)
                else:
                    send_tile(home, acc, inside, col + tl.arange(0, BLOCK_N), N, ELEMENT)
                start += programs
            start -= blocks * width
        if signals.complete(peers, 0, part, programs):
            signals.publish_to_all(peers, part)


@triton.jit(do_not_specialize=["max_rows", "part_tiles", "send_programs"])
def moe_matmul_combine_kernel(
    peers,
    x,  # pointers, or TMA descriptors: see Note [Groups by TMA] in grouped_matmul.py
    w,
    x2,  # a second product, added to the first, with the strides of that; or None, as w2
    w2,
    strides,  # (stride_xm, stride_xk, stride_we, stride_wn, stride_wk)
    offsets,  # int32 [E + 1], of this rank's experts
    to,  # int32 [R], the rank whose token each row is
    at,  # int32 [R], where the row belongs in that rank's slot
    begins,  # int32 [W + 1], which rows of this rank's slot are of each owner
    totals,  # int32 [W], rows of each owner
    max_rows,
    choices,  # int32 [T, TOP_K], where in the slot each choice's row is; past the last one of a dropped choice
    weights,  # fp32 [T, TOP_K], or None for ones
    out,  # contiguous [T, N]
    E,
    R,
    T,
    N,
    K,
    part_tiles,  # of the columns
    send_programs,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART_M: tl.constexpr,  # tokens that are summed at once
    EVEN_K: tl.constexpr,
    HALVES: tl.constexpr = False,  # of a tile's columns end one after another, so that fewer registers do
    PRECISION: tl.constexpr = "ieee",
    TMA: tl.constexpr = False,
    X_TMA: tl.constexpr = False,
    ACROSS: tl.constexpr = False,
):
    if signals.failed(peers):
        return
    if overflows(peers, totals, max_rows):
        return
    world: tl.constexpr = peers.world_size
    element: tl.constexpr = out.dtype.element_ty
    if tl.program_id(0) < send_programs:
        multiply_and_send(
            peers, x, w, x2, w2, strides, offsets, to, at, E, R, N, K, part_tiles, send_programs,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, HALVES, PRECISION, TMA, X_TMA, ACROSS, element,
        )  # fmt: skip
    else:
        rank = signals.rank_of(peers)
        arrived = tl.load(begins + world)
        pushed = tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(element)), 16)
        start, programs = tl.program_id(0) - send_programs, tl.num_programs(0) - send_programs
        num_cols = cdiv(N, BLOCK_N)
        for part in range(cdiv(num_cols, part_tiles)):
            signals.wait_chunk_of_all(peers, part)
            first_col = part * part_tiles * BLOCK_N
            last_col = tl.minimum(first_col + part_tiles * BLOCK_N, N)
            sum_choices(
                pushed, arrived, choices, weights, out, T, N, first_col, last_col, start, programs, TOP_K, PART_M,
                BLOCK_N,
            )  # fmt: skip
        if start == 0:
            signals.wait_all_arrivals(peers)
    signals.leave(peers)
