"""Rotary position embedding of queries and keys in one launch; the backward is the same rotation reversed."""

import triton
import triton.language as tl

from .tiles import inline, narrow, widen


@inline
def rotate_heads(x, y, stride_h, c, s, heads, HALF: tl.constexpr, PAD: tl.constexpr, HEADS: tl.constexpr):
    """Rotate the heads of one token: feature i against feature i + HALF. y is contiguous."""
    cols = tl.arange(0, PAD)
    for first in range(0, heads, HEADS):
        rows = first + tl.arange(0, HEADS)
        mask = (rows < heads)[:, None] & (cols < HALF)[None, :]
        at = rows[:, None] * stride_h + cols[None, :]
        x1 = widen(tl.load(x + at, mask=mask, other=0.0)).to(tl.float32)
        x2 = widen(tl.load(x + at + HALF, mask=mask, other=0.0)).to(tl.float32)
        to = rows[:, None] * (2 * HALF) + cols[None, :]
        tl.store(y + to, narrow(x1 * c - x2 * s, y.dtype.element_ty), mask=mask)
        tl.store(y + to + HALF, narrow(x2 * c + x1 * s, y.dtype.element_ty), mask=mask)


@triton.jit
def rope_kernel(
    q,  # [B, S, heads_q, 2 HALF], the last dim contiguous
    q_strides,  # of B, S, heads
    q_out,  # contiguous
    heads_q,
    k,
    k_strides,
    k_out,
    heads_k,
    cos,  # fp32 [B or 1, S, HALF], contiguous
    sin,
    S,
    stride_cos,  # of B; 0 if all sequences share their positions
    SIGN: tl.constexpr,  # 1, or -1 for the reverse rotation
    HALF: tl.constexpr,
    PAD: tl.constexpr,
    HEADS: tl.constexpr,
):
    """A program takes one token: its angles are read once for all heads of q and of k."""
    token = tl.program_id(0).to(tl.int64)
    b = token // S
    t = token % S
    cols = tl.arange(0, PAD)
    at = b * stride_cos + t * HALF + cols
    c = tl.load(cos + at, mask=cols < HALF, other=0.0)[None, :]
    s = tl.load(sin + at, mask=cols < HALF, other=0.0)[None, :] * SIGN
    q_in = q + b * q_strides[0] + t * q_strides[1]
    k_in = k + b * k_strides[0] + t * k_strides[1]
    rotate_heads(q_in, q_out + token * heads_q * 2 * HALF, q_strides[2], c, s, heads_q, HALF, PAD, HEADS)
    rotate_heads(k_in, k_out + token * heads_k * 2 * HALF, k_strides[2], c, s, heads_k, HALF, PAD, HEADS)
