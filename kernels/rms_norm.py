"""RMSNorm with the preceding residual sum, forward and backward: each tensor is read and written once.

A program holds whole rows: H is at most BLOCK. Sums are fp32, results are rounded once.
"""

import triton
import triton.language as tl

from .tiles import inline, narrow, widen


@inline
def load_rows(x, rows, stride, cols, mask):
    """x[rows, cols] in fp32, zero outside."""
    at = x + rows[:, None].to(tl.int64) * stride + cols[None, :]
    return widen(tl.load(at, mask=mask, other=0.0)).to(tl.float32)


@inline
def store_rows(y, value, rows, stride, cols, mask):
    """y[rows, cols] = value, rounded once."""
    at = y + rows[:, None].to(tl.int64) * stride + cols[None, :]
    tl.store(at, narrow(value, y.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_kernel(
    x,
    stride_x,
    residual,  # or None
    stride_r,
    weight,
    y,  # contiguous, as is `total`
    total,  # x + residual, rounded; None without a residual
    inverse_rms,  # fp32 [T]
    T,
    H,
    eps,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y [T, H] = h / sqrt(mean(h^2) + eps) * weight with h = x (+ residual). A program takes ROWS rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < T)[:, None] & (cols < H)[None, :]
    h = load_rows(x, rows, stride_x, cols, mask)
    if residual is not None:
        h += load_rows(residual, rows, stride_r, cols, mask)
        store_rows(total, h, rows, H, cols, mask)
        h = widen(narrow(h, total.dtype.element_ty)).to(tl.float32)
    mean = tl.sum(h * h, axis=1) / H
    r = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(mean + eps))
    tl.store(inverse_rms + rows, r, mask=rows < T)
    w = widen(tl.load(weight + cols, mask=cols < H, other=0.0)).to(tl.float32)
    store_rows(y, h * r[:, None] * w[None, :], rows, H, cols, mask)


@triton.jit
def rms_norm_backward_kernel(
    dy,
    stride_dy,
    dtotal,  # gradient of `total`, or None
    stride_dt,
    h,
    stride_h,
    weight,
    inverse_rms,
    dx,  # contiguous; the gradient of x and of the residual
    dweight,  # fp32 [programs, H]: each program's part of the sum over rows
    T,
    H,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,  # number of row loads in flight
):
    """dx = r (g - h r^2 mean(g h)) (+ dtotal) with g = dy weight; dweight = sum over rows of dy h r.

    A row's number alone decides which program takes it, so the sums are the same in every run.
    """
    cols = tl.arange(0, BLOCK)
    w = widen(tl.load(weight + cols, mask=cols < H, other=0.0)).to(tl.float32)
    dw = tl.full((BLOCK,), 0.0, tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, T, tl.num_programs(0) * ROWS, num_stages=STAGES):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < T)[:, None] & (cols < H)[None, :]
        r = tl.load(inverse_rms + rows, mask=rows < T, other=0.0)[:, None]
        normed = load_rows(h, rows, stride_h, cols, mask) * r
        grad = load_rows(dy, rows, stride_dy, cols, mask)
        dw += tl.sum(grad * normed, axis=0)
        grad = grad * w[None, :]
        mean = tl.sum(grad * normed, axis=1) / H
        back = (grad - normed * mean[:, None]) * r
        if dtotal is not None:
            back += load_rows(dtotal, rows, stride_dt, cols, mask)
        store_rows(dx, back, rows, H, cols, mask)
    tl.store(dweight + tl.program_id(0).to(tl.int64) * H + cols, dw, mask=cols < H)
