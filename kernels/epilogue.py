"""What happens to a tile of sums before it is rounded and stored, all of it in fp32.

product   scaled by a number, by one of each row and by one of each column (or of each tensor)
+ bias    of each column
gate      act(gate) * up, of two products of the same rows: see swiglu.py
+ residual
"""

import triton.language as tl

from .tiles import inline, widen


@inline
def add_bias(acc, bias, cols, col_mask):
    """acc + bias[cols]; no bias is None."""
    if bias is not None:
        acc += widen(tl.load(bias + cols, mask=col_mask, other=0.0)).to(tl.float32)[None, :]
    return acc


@inline
def scaled(acc, scale, x_scale, stride_xs, rows, row_mask, w_scale, stride_ws, cols, col_mask):
    """acc times a number and the fp32 scales of its rows and columns; each may be None. A stride of 0: one for all."""
    if x_scale is not None:
        acc *= tl.load(x_scale + rows.to(tl.int64) * stride_xs, mask=row_mask, other=0.0)[:, None]
    if w_scale is not None:
        acc *= tl.load(w_scale + cols.to(tl.int64) * stride_ws, mask=col_mask, other=0.0)[None, :]
    if scale is not None:
        acc *= scale
    return acc


@inline
def add_residual(acc, residual, stride_rm, stride_rn, rows, cols, mask):
    """acc + residual[rows, cols]; no residual is None."""
    if residual is not None:
        at = rows.to(tl.int64)[:, None] * stride_rm + cols.to(tl.int64)[None, :] * stride_rn
        acc += widen(tl.load(residual + at, mask=mask, other=0.0)).to(tl.float32)
    return acc
