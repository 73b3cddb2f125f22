"""y = all_reduce(x @ w.T) + bias in one launch, summed by the NVLink switch.

    x        [T, K_r]    this rank's columns of the full input
    w        [N, K_r]
    y        [T, N]      the same bits on every rank

Partials stay in the rank's own slot, where the switch sums them (multimem.py): a rank receives every sum once, instead
of all partials of its rows and then the sums of the other rows.

Chunk c is `group` consecutive tiles, and rank c % W owns it. All ranks multiply all chunks, in the same order:

    rank 1 of 4     products of   0  1  2  3  4  5  6  7  8  9 10 11          into its own slot
                    sums of                      1           5        9       by the switch, into all slots
                    copies of                             0  1  2  3 ...      into y

A program that has multiplied chunk c then sums chunk c - behind, if this rank owns it, and copies chunk c - 2 * behind.
The remaining sums and copies at the end are separate pieces of work, and these sums are split into parts. Work is
handed out in this order (Note [Tickets] in signals.py): a chunk is waited for only after it was taken, and a program
publishes its stores before it waits. So one resident program per rank is enough.

A sum overwrites the partials, which only the owner reads. The switch rounds it to the element, and that is y; so the
bias must be added to rank 0's partial. All ranks have the same bits, because one rank stores each sum for all.
"""

import triton
import triton.language as tl

from . import multimem, signals
from .epilogue import add_bias
from .matmul_reduce_scatter import part_of_rows, part_of_tile, partial_tile
from .tiles import cdiv, grouped, inline, narrow


@inline
def first_flag(chunk, whole, parts):
    """The first flag of a chunk's sum. The first `whole` chunks have one flag each, the others one per part."""
    return tl.where(chunk < whole, chunk, whole + (chunk - whole) * parts)


@triton.jit(do_not_specialize=["group", "behind", "parts", "height"])
def multimem_all_reduce_kernel(
    peers,
    multicast,  # int64 [1] or None, see multimem.py
    xs,  # (x,)
    strides_xm,
    strides_xk,
    ws,  # (w,)
    strides_wn,
    strides_wk,
    bias,  # [N] or None
    y,  # contiguous
    M,
    N,
    stride,  # elements of a row in a slot
    Ks,
    group,
    behind,
    parts,
    height,  # rows of a tile in a part
    flags,  # the first flag of the sums
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PART_M: tl.constexpr,  # rows of a tile that are copied at once
    SUM_M: tl.constexpr,  # rows of a tile that are summed at once
    PRODUCTS: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr = False,
    X_TMA: tl.constexpr = False,
    ACROSS: tl.constexpr = False,  # w by TMA, as [K, N]
    w_descriptor0=None,  # with TMA: of w
    x_descriptor0=None,  # with X_TMA: of x
):
    """A slot holds [M, stride]: own partials, then sums. Flag c is for chunk c of a source, `flags` + i for a sum."""
    if signals.failed(peers):
        return
    if TMA:
        ws = (w_descriptor0,)
    if X_TMA:
        xs = (x_descriptor0,)
    element: tl.constexpr = y.dtype.element_ty
    world: tl.constexpr = peers.world_size
    rank = signals.rank_of(peers)
    if tl.program_id(0) == 0:
        signals.arrive(peers)
    slot = tl.multiple_of(signals.slot(peers, rank).to(tl.pointer_type(element)), 16)
    num_rows, num_cols = cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)
    tiles = num_rows * num_cols
    chunks = cdiv(tiles, group)
    whole = tl.maximum(chunks - behind, 0)  # chunks with sums that are not split
    owned, begun = cdiv(tl.maximum(chunks - rank, 0), world), cdiv(tl.maximum(whole - rank, 0), world)
    left = (owned - begun) * parts
    copied = tl.maximum(chunks - 2 * behind, 0)
    ticket = signals.take(peers, signals.TILE)
    while ticket < chunks + left + chunks - copied:
        summed, part, rows_of_part, copy = -1, 0, BLOCK_M, -1
        if ticket < chunks:
            chunk = ticket
            for tile in range(chunk * group, tl.minimum((chunk + 1) * group, tiles)):
                row, col = grouped(tile, num_rows, num_cols, GROUP)
                rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
                value, cols, _exists = partial_tile(
                    xs,
                    row * BLOCK_M,
                    rows,
                    rows < M,
                    strides_xm,
                    strides_xk,
                    ws,
                    strides_wn,
                    strides_wk,
                    col,
                    N,
                    Ks,
                    BLOCK_N,
                    BLOCK_K,
                    PRODUCTS,
                    EVEN_K,
                    TMA,
                    X_TMA,
                    ACROSS,
                    tl.float32,
                )
                if bias is not None:
                    if rank == 0:  # a branch: with a mask, the sums of a large tile would not fit in the registers
                        value = add_bias(value, bias, cols, cols < N)
                at = rows.to(tl.int64)[:, None] * stride + cols[None, :]
                tl.store(slot + at, narrow(value, element), mask=(rows < M)[:, None] & (cols < stride)[None, :])
            signals.publish(peers, chunk % world, chunk)
            summed = tl.where((ticket - behind) % world == rank, ticket - behind, -1)
            copy = ticket - 2 * behind
        elif ticket < chunks + left:
            turn = ticket - chunks
            summed, part, rows_of_part = (begun + turn // parts) * world + rank, turn % parts, height
        else:
            copy = copied + ticket - chunks - left
        if summed >= 0:
            chunk = summed
            signals.wait_chunk_of_all(peers, chunk)
            multimem.other_address(multicast)
            for tile in range(chunk * group, tl.minimum((chunk + 1) * group, tiles)):
                row, col = grouped(tile, num_rows, num_cols, GROUP)
                begin, last = part_of_rows(row, part, rows_of_part, M, BLOCK_M)
                for first in range(begin, last, SUM_M):
                    multimem.sum_slots(peers, multicast, first, last, col, stride, SUM_M, BLOCK_N, element)
            multimem.other_address(multicast)
            signals.publish_to_all(peers, flags + first_flag(chunk, whole, parts) + part)
        if copy >= 0:
            chunk = copy
            begin = flags + first_flag(chunk, whole, parts)
            signals.wait_chunks(peers, chunk % world, begin, begin + tl.where(chunk < whole, 1, parts))
            for tile in range(chunk * group, tl.minimum((chunk + 1) * group, tiles)):
                row, col = grouped(tile, num_rows, num_cols, GROUP)
                last = tl.minimum((row + 1) * BLOCK_M, M)
                for first in range(row * BLOCK_M, last, PART_M):
                    at, mask, cols = part_of_tile(first, last, col, N, PART_M, BLOCK_N)
                    begin_of_row = (first + tl.arange(0, PART_M)).to(tl.int64) * stride
                    tl.store(y + at, tl.load(slot + begin_of_row[:, None] + cols[None, :], mask=mask), mask=mask)
        ticket = signals.take(peers, signals.TILE)
    if tl.program_id(0) == 0:
        signals.wait_all_arrivals(peers)
    signals.leave(peers)
