"""The last matmul of a mixture of experts and its combine in one launch: rows are sent home as their tiles finish.

    h     [R, K]       this rank's rows, expert-major, as in grouped_matmul.py
    w     [E, N, K]    of this rank's experts
    out   [T_r, N]     sum over a token's choices of weight * (h[row] @ w[e].T), as in moe_exchange.py

In the backward of a gated MLP, it sums (h[row] @ w[e].T + h2[row] @ w2[e].T) for its two gradients, without weights.

A tile's epilogue stores each row at its destination: in the slot of its token's rank, at the choice's position in that
rank's order. Columns are processed part by part. A token's choices are spread over all experts and owners, so with a
split by rows no sum could begin before nearly all products are done. With a split by columns, a quarter of every sum
can begin after a quarter of the products. All programs do both, in ticket order (Note [Tickets] in signals.py):

    products of part 0 | of part 1 | sums of part 0 | products of part 2 | sums of part 1 | ... | sums of the last part

So a part has usually arrived when it is summed: it was in flight while the next one was multiplied. When a program has
stored all of its tiles of a part, it adds them to the count of finished ones, before it waits for anything. Flag p of a
rank covers part p of everything it sends, Note [One flag of many programs] in signals.py. The products that a wait
needs are taken before that wait: one resident program per rank is enough.

Tiles and sums are those of the two separate kernels, and the product is rounded to its dtype before it is sent, so the
results are bitwise equal.

Source: the split by columns is COMET's, Zhang et al. 2025 (arXiv 2502.19811), section 3.1.
"""

import triton
import triton.language as tl

from . import signals
from .grouped_matmul import first_row, last_row, sum_tile
from .moe_exchange import overflows, sum_choices
from .tiles import cdiv, halves, inline, narrow


@inline
def row_addresses(peers, to, at, rows, inside, N, ELEMENT: tl.constexpr):
    """Address of the first element of each row's place in the slot of its token's rank."""
    rank = tl.load(to + rows, mask=inside, other=0)
    place = tl.load(at + rows, mask=inside, other=0).to(tl.int64)
    return tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(ELEMENT)), 16) + place * N


@inline
def send_tile(home, acc, inside, cols, N, ELEMENT: tl.constexpr):
    """Store columns of rows at their row_addresses, rounded once."""
    mask = inside[:, None] & (cols < N)[None, :]
    tl.store(home[:, None] + cols[None, :], narrow(acc, ELEMENT), mask=mask)


@inline
def all_blocks(offsets, E, R, BLOCK_M: tl.constexpr):
    """Number of rows of tiles, over all experts."""
    blocks = tl.full((), 0, tl.int32)
    end = first_row(offsets, R)
    for expert in range(E):
        begin = end
        end = last_row(offsets, expert, begin, R)
        blocks += cdiv(end - begin, BLOCK_M)
    return blocks


@triton.jit(do_not_specialize=["max_rows", "part_tiles", "pieces"])
def moe_matmul_combine_kernel(
    peers,
    x,  # pointers, or TMA descriptors: see Note [Groups by TMA] in grouped_matmul.py
    w,
    x2,  # x2 and w2: a second product with the same strides, added to the first; or None
    w2,
    strides,  # (stride_xm, stride_xk, stride_we, stride_wn, stride_wk)
    offsets,  # int32 [E + 1], of this rank's experts
    to,  # int32 [R], the rank of each row's token
    at,  # int32 [R], the row's place in that rank's slot
    begins,  # int32 [W + 1], where each owner's rows begin in this rank's slot
    totals,  # int32 [W], rows of each owner
    max_rows,
    choices,  # int32 [T, TOP_K], where in the slot each choice's row is; past the last row if it is dropped
    weights,  # fp32 [T, TOP_K], or None for ones
    out,  # contiguous [T, N]
    E,
    R,
    T,
    N,
    K,
    part_tiles,  # tiles of columns in a part
    pieces,  # of a part's sums; piece i takes every `pieces`-th block of tokens from i on
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PART_M: tl.constexpr,  # tokens that are summed at once
    EVEN_K: tl.constexpr,
    HALVES: tl.constexpr = False,  # finish a tile's columns in two halves, which takes fewer registers
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
    rank = signals.rank_of(peers)
    num_cols = cdiv(N, BLOCK_N)
    parts = cdiv(num_cols, part_tiles)
    blocks = all_blocks(offsets, E, R, BLOCK_M)
    if tl.program_id(0) == 0:
        signals.arrive(peers)
        if blocks == 0:
            for part in range(parts):
                signals.publish_to_all(peers, part)
    done = tl.full((), 0, tl.int32)  # tickets of earlier work
    ticket = signals.take(peers, signals.TILE)
    for part in range(parts + 1):
        first_col = part * part_tiles
        width = tl.maximum(tl.minimum(part_tiles, num_cols - first_col), 0)
        mine = tl.full((), 0, tl.int32)
        end = first_row(offsets, R)
        for expert in range(E):
            begin = end
            end = last_row(offsets, expert, begin, R)
            tiles = cdiv(end - begin, BLOCK_M) * width
            while ticket < done + tiles:
                row = begin + (ticket - done) // width * BLOCK_M
                col = (first_col + (ticket - done) % width) * BLOCK_N
                rows = row + tl.arange(0, BLOCK_M)
                inside = rows < end
                acc = sum_tile(
                    x, w, x2, w2, strides, expert, row, rows, inside, col, N, K, BLOCK_N, BLOCK_K, EVEN_K, PRECISION,
                    TMA, X_TMA, ACROSS,
                )  # fmt: skip
                home = row_addresses(peers, to, at, rows, inside, N, element)
                if HALVES:
                    left, right = halves(acc)
                    half = col + tl.arange(0, BLOCK_N // 2)
                    send_tile(home, left, inside, half, N, element)
                    send_tile(home, right, inside, half + BLOCK_N // 2, N, element)
                else:
                    send_tile(home, acc, inside, col + tl.arange(0, BLOCK_N), N, element)
                mine += 1
                ticket = signals.take(peers, signals.TILE)
            done += tiles
        if mine > 0:
            if signals.complete_pieces(peers, 0, part, mine, blocks * width):
                signals.publish_to_all(peers, part)
        if part > 0:
            while ticket < done + pieces:
                signals.wait_chunk_of_all(peers, part - 1)
                last_col = tl.minimum(first_col * BLOCK_N, N)
                arrived = tl.load(begins + world)
                pushed = tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(element)), 16)
                sum_choices(
                    pushed, arrived, choices, weights, out, T, N, (first_col - part_tiles) * BLOCK_N, last_col,
                    ticket - done, pieces, TOP_K, PART_M, BLOCK_N,
                )  # fmt: skip
                ticket = signals.take(peers, signals.TILE)
            done += pieces
    if tl.program_id(0) == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)
