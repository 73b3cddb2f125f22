"""SwiGLU: silu(gate) * up and its gradients, in fp32, rounded once, nothing kept but the inputs."""

import triton
import triton.language as tl

from .tiles import inline, narrow, widen


@inline
def load_wide(x, at, mask):
    """x[at] in fp32."""
    return widen(tl.load(x + at, mask=mask, other=0.0)).to(tl.float32)


@inline
def sigmoid(x):
    """1 / (1 + exp(-x)), which is 0 where exp overflows."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def swiglu_kernel(gate, up, y, N, BLOCK: tl.constexpr):
    """y [N] = silu(gate [N]) * up [N], all contiguous; a program takes BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    g = load_wide(gate, at, mask)
    value = g * sigmoid(g) * load_wide(up, at, mask)
    tl.store(y + at, narrow(value, y.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(dy, gate, up, dgate, dup, N, BLOCK: tl.constexpr):
    """dup = dy silu(gate); dgate = dy up s (1 + gate (1 - s)) with s = sigmoid(gate)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    g = load_wide(gate, at, mask)
    grad = load_wide(dy, at, mask)
    s = sigmoid(g)
    silu = g * s
    tl.store(dup + at, narrow(grad * silu, dup.dtype.element_ty), mask=mask)
    back = grad * load_wide(up, at, mask) * (s + silu * (1.0 - s))
    tl.store(dgate + at, narrow(back, dgate.dtype.element_ty), mask=mask)
