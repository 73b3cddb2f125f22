"""Cross-entropy over one part of the vocabulary: statistics and the gradient of the logits, one pass over them each.

    statistics   read the logits once: log-sum-exp of each row, and the label's logit if it is in this part
    gradient     read them again and write (exp(logits - lse) - onehot) * scale, optionally in place

A thread keeps its largest logit so far and a sum of exponentials relative to it. It rescales that sum once per EACH
logits, which are one 16-byte access if rows are aligned: 9 exponentials for 8 logits, not the 16 of one update per
logit. Threads exchange values only at the end of a row, so the loop over a row contains no barrier.
"""

import triton
import triton.language as tl

from .tiles import cdiv, inline, narrow, widen

INF = tl.constexpr(float("inf"))


@inline
def finite_or_zero(x):
    """x, or 0 where x is infinite: safe to subtract under an exponential, where inf - inf would be nan."""
    return tl.where(tl.abs(x) == INF, 0.0, x)


@triton.jit
def logit_stats_kernel(
    logits,  # [T, V], each row contiguous
    stride,
    labels,  # int64 [T], of the whole vocabulary
    start,  # the label of the first column here
    stats,  # fp32 [T, 2], contiguous
    T,
    V,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,  # whether a lane's EACH logits are contiguous, or interleaved with those of other lanes
):
    """stats[t] = (log sum_v exp(logits[t, v]), logits[t, labels[t] - start] or 0 if that is not a column).

    A program takes ROWS rows, BLOCK columns at a time; a lane takes EACH = BLOCK / LANES of these. Logits of -inf do
    not count. A row of only these, or without columns, gives -inf; a row with +inf gives inf, one with nan gives nan.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < T
    base = logits + rows.to(tl.int64) * stride
    column = tl.load(labels + rows, mask=inside, other=0) - start
    here = inside & (column >= 0) & (column < V)
    target = widen(tl.load(base + column, mask=here, other=0.0)).to(tl.float32)
    largest = tl.full((ROWS, LANES), -INF, tl.float32)
    total = tl.full((ROWS, LANES), 0.0, tl.float32)
    EACH: tl.constexpr = BLOCK // LANES
    if VECTOR:
        lanes = tl.arange(0, LANES)[None, :] * EACH + tl.arange(0, EACH)[:, None]
    else:
        lanes = tl.arange(0, LANES)[None, :] + tl.arange(0, EACH)[:, None] * LANES
    for first in range(0, V, BLOCK):
        cols = (first + lanes)[:, None, :]  # [EACH, ROWS, LANES]: in this layout one thread has all of EACH
        mask = inside[None, :, None] & (cols < V)
        x = widen(tl.load(base[None, :, None] + cols, mask=mask, other=-INF)).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        shift = finite_or_zero(larger)
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(x - shift[None, :, :]), axis=0)
        largest = larger
    shift = finite_or_zero(tl.max(largest, axis=1))
    lse = tl.log(tl.sum(total * tl.exp(largest - shift[:, None]), axis=1)) + shift
    tl.store(stats + 2 * rows, lse, mask=inside)
    tl.store(stats + 2 * rows + 1, target, mask=inside)


@triton.jit
def logit_gradient_kernel(
    logits,  # [T, V], each row contiguous
    stride,
    gradient,  # [T, V], each row contiguous; may be `logits`: each element is written by the thread that read it
    stride_g,
    labels,  # int64 [T]
    start,
    lse,  # fp32 [T], of the whole vocabulary
    scale,  # fp32 [T]
    T,
    V,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """gradient = (exp(logits - lse) - onehot) * scale, rounded once; zero if scale is zero, whatever the logits are.

    A program takes ROWS rows and BLOCK columns.
    """
    blocks = cdiv(V, BLOCK)
    rows = tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = rows < T
    mask = inside[:, None] & (cols < V)[None, :]
    factor = tl.load(scale + rows, mask=inside, other=0.0)[:, None]
    total = tl.load(lse + rows, mask=inside, other=0.0)[:, None]
    column = (tl.load(labels + rows, mask=inside, other=0) - start)[:, None]
    at = rows[:, None].to(tl.int64)
    x = widen(tl.load(logits + at * stride + cols[None, :], mask=mask, other=0.0)).to(tl.float32)
    value = tl.exp(x - total) - tl.where(cols[None, :] == column, 1.0, 0.0)
    value = tl.where(factor == 0.0, 0.0, value * factor)
    tl.store(gradient + at * stride_g + cols[None, :], narrow(value, gradient.dtype.element_ty), mask=mask)
