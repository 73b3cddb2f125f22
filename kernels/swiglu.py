"""SwiGLU and GeGLU: act(gate) * up and its gradients, in fp32, rounded once; only the inputs are saved."""

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


@inline
def activated(g, ACT: tl.constexpr):
    """act(g) and its derivative. Each act is g s(g), with s a distribution function, so the derivative is s + g s'."""
    if ACT == "silu":
        s = sigmoid(g)
        slope = s * (1.0 - s)
    elif ACT == "gelu":
        s = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        slope = 0.3989422804014327 * tl.exp(-0.5 * g * g)
    else:  # the same by tanh: (1 + tanh(u)) / 2 = sigmoid(2 u)
        s = sigmoid(1.5957691216057308 * (g + 0.044715 * g * g * g))
        slope = s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    return g * s, s + g * slope


@triton.jit
def swiglu_kernel(gate, up, y, N, BLOCK: tl.constexpr, ACT: tl.constexpr):
    """y [N] = act(gate [N]) * up [N], all contiguous; a program takes BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < N
    g = load_wide(gate, at, mask)
    value, _ = activated(g, ACT)
    tl.store(y + at, narrow(value * load_wide(up, at, mask), y.dtype.element_ty), mask=mask)


@inline
def store_gate_gradients(dy, gate, up, dgate, dup, at, mask, ACT: tl.constexpr):
    """dup[at] = dy act(gate); dgate[at] = dy up act'(gate)."""
    value, slope = activated(load_wide(gate, at, mask), ACT)
    grad = load_wide(dy, at, mask)
    tl.store(dup + at, narrow(grad * value, dup.dtype.element_ty), mask=mask)
    back = grad * load_wide(up, at, mask) * slope
    tl.store(dgate + at, narrow(back, dgate.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(dy, gate, up, dgate, dup, N, BLOCK: tl.constexpr, ACT: tl.constexpr):
    """dup = dy act(gate); dgate = dy up act'(gate), all [N], contiguous; a program takes BLOCK elements."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    store_gate_gradients(dy, gate, up, dgate, dup, at, at < N, ACT)
