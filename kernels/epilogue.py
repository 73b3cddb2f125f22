"""The epilogue of a tile of sums before it is rounded and stored, all in fp32.

product   scaled by one number per row and one per column (or one per tensor)
+ bias    one per column
"""

import triton.language as tl

from .tiles import inline, widen


@inline
def add_bias(acc, bias, cols, col_mask):
    """acc + bias[cols], or acc if bias is None."""
    if bias is not None:
        acc += widen(tl.load(bias + cols, mask=col_mask, other=0.0)).to(tl.float32)[None, :]
    return acc


@inline
def scaled(acc, x_scale, stride_xs, rows, row_mask, w_scale, stride_ws, cols, col_mask):
    """acc times the fp32 scales of its rows and columns; either may be None. With stride 0, one scale for all."""
    if x_scale is not None:
        acc *= tl.load(x_scale + rows.to(tl.int64) * stride_xs, mask=row_mask, other=0.0)[:, None]
    if w_scale is not None:
        acc *= tl.load(w_scale + cols.to(tl.int64) * stride_ws, mask=col_mask, other=0.0)[None, :]
    return acc
