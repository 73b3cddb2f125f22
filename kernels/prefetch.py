"""Prefetch weights into the L2 cache while a program waits for peers.

A kernel that gathers few rows is bound by loading its weights, and it loads nothing while it waits for rows. So before
it waits, each program prefetches the first columns of one block of a weight. Any program may multiply that block: all
SMs share the L2 cache. A program prefetches no more than memory delivers during such a wait. A prefetch returns
nothing, orders nothing and changes no memory: without it a kernel is only slower.

PTX ISA 8.8, section 9.7.9.15 (prefetch).
"""

import triton.language as tl

from .tiles import INTERPRETED, inline, to_int64

LINE = tl.constexpr(128)  # bytes per prefetch
LINES = tl.constexpr(512)  # per program: 64 KiB
MOST_ROWS = tl.constexpr(32)  # rows of x up to which it pays off: transfers of more rows would wait for the weights


@inline
def prefetch_rows(w, first, width, stride_wn, stride_wk, K, BLOCK_N: tl.constexpr, CLOCK: tl.constexpr):
    """Prefetch the first columns of rows first, ..., first + BLOCK_N - 1 of w [width, K], if its rows are contiguous.

    first   may lie outside of w: then nothing is prefetched
    CLOCK   of `Peers`: only "cuda" has this instruction
    """
    if CLOCK == "cuda" and not INTERPRETED:
        EACH: tl.constexpr = LINES // BLOCK_N
        STEP: tl.constexpr = LINE * 8 // w.dtype.element_ty.primitive_bitwidth
        if (stride_wk == 1) & (K > 0) & (first >= 0) & (first < width):
            rows = tl.minimum(first + tl.arange(0, BLOCK_N), width - 1)
            cols = tl.minimum(tl.arange(0, EACH) * STEP, K - 1)
            at = w + (to_int64(rows) * stride_wn)[:, None] + cols[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
            )
