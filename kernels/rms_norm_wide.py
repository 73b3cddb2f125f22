"""RMSNorm of rows that are too wide for a program's registers: two passes over a row, the second from cache.

Results are as in rms_norm.py. A row passes through registers BLOCK columns at a time. Both passes compute the sum of x
and the residual; the second cannot read it back, because another thread may have stored it.

Tried and lost: a program that holds dweight of all columns in registers, in pieces, spills from 16384 columns on.
"""

import triton
import triton.language as tl

from .tiles import inline, narrow, to_int64, widen


@inline
def load_wide(x, row, stride, cols, mask):
    """x[row, cols] in fp32, zero outside."""
    return widen(tl.load(x + to_int64(row) * stride + cols, mask=mask, other=0.0)).to(tl.float32)


@inline
def summed(x, stride_x, residual, stride_r, row, cols, mask):
    """x (+ residual) in fp32, rounded as it is stored."""
    h = load_wide(x, row, stride_x, cols, mask)
    if residual is not None:
        h += load_wide(residual, row, stride_r, cols, mask)
        h = widen(narrow(h, x.dtype.element_ty)).to(tl.float32)
    return h


@triton.jit
def rms_norm_wide_kernel(
    x, stride_x, residual, stride_r, weight, y, total, inverse_rms, T, H, eps, BLOCK: tl.constexpr
):
    """As rms_norm_kernel, with one row per program."""
    row = tl.program_id(0)
    squares = tl.full((BLOCK,), 0.0, tl.float32)
    for first in range(0, H, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        h = summed(x, stride_x, residual, stride_r, row, cols, cols < H)
        if residual is not None:
            tl.store(total + to_int64(row) * H + cols, narrow(h, total.dtype.element_ty), mask=cols < H)
        squares += h * h
    mean = tl.sum(squares) / H
    r = tl.div_rn(tl.full((), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    tl.store(inverse_rms + row, r)
    for first in range(0, H, BLOCK):
        cols = first + tl.arange(0, BLOCK)
        h = summed(x, stride_x, residual, stride_r, row, cols, cols < H)
        w = widen(tl.load(weight + cols, mask=cols < H, other=0.0)).to(tl.float32)
        tl.store(y + to_int64(row) * H + cols, narrow(h * r * w, y.dtype.element_ty), mask=cols < H)


@triton.jit
def rms_norm_wide_backward_kernel(
    dy, stride_dy, dtotal, stride_dt, h, stride_h, weight, inverse_rms, dx, dweight, T, H,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """As rms_norm_backward_kernel, with COLUMNS programs for the same rows, one for each BLOCK columns.

    Each reads whole rows for their mean. Programs of the same rows run side by side and share the reads in the cache.
    """
    part = tl.program_id(0) // COLUMNS
    own = tl.program_id(0) % COLUMNS * BLOCK + tl.arange(0, BLOCK)
    dw = tl.full((BLOCK,), 0.0, tl.float32)
    for row in range(part, T, tl.num_programs(0) // COLUMNS):
        r = tl.load(inverse_rms + row)
        products = tl.full((BLOCK,), 0.0, tl.float32)
        for first in range(0, H, BLOCK):
            cols = first + tl.arange(0, BLOCK)
            w = widen(tl.load(weight + cols, mask=cols < H, other=0.0)).to(tl.float32)
            grad = load_wide(dy, row, stride_dy, cols, cols < H)
            products += grad * w * load_wide(h, row, stride_h, cols, cols < H)
        mean = tl.sum(products) * r / H
        w = widen(tl.load(weight + own, mask=own < H, other=0.0)).to(tl.float32)
        grad = load_wide(dy, row, stride_dy, own, own < H)
        normed = load_wide(h, row, stride_h, own, own < H) * r
        dw += grad * normed
        back = (grad * w - normed * mean) * r
        if dtotal is not None:
            back += load_wide(dtotal, row, stride_dt, own, own < H)
        tl.store(dx + to_int64(row) * H + own, narrow(back, dx.dtype.element_ty), mask=own < H)
    tl.store(dweight + to_int64(part) * H + own, dw, mask=own < H)
