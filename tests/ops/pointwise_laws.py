"""Laws of the elementwise kernels, on any device: fp64's values and gradients, within fp32's rounding error.

With e = eps of fp32, a sum of H terms is off by (H + 2) / 2 e of the sum of absolute values, a product, quotient or
root by e / 2 or less, and exp(x) by (2 + |x|) e, because it is computed as a power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedtp.ops import pointwise
from tests.nn.support import assert_within

E = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Draw:
    """The inputs of one test. layout: "plain", "sliced" (a gap between rows) or "transposed"."""

    dtype: torch.dtype
    rows: int
    width: int
    layout: str = "plain"
    seed: int = 0
    device: str = "cpu"
    scale: float = 1.0
    heads: tuple[int, int] = (2, 1)
    batch: int = 1

    def tensors(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [self.laid_out(self.scale * torch.randn(s, generator=generator)) for s in shapes]

    def laid_out(self, x: Tensor) -> Tensor:
        x = x.to(self.device, self.dtype)
        if self.layout == "sliced":
            wider = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan, dtype=x.dtype, device=x.device)
            wider[..., : x.shape[-1]] = x
            x = wider[..., : x.shape[-1]]
        elif self.layout == "transposed" and x.dim() > 1:
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        return x


def gradients(
    function: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], grads: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs of `function` and the gradients of its inputs."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outs = function(*inputs)
    torch.autograd.backward(outs, [g.to(o.dtype) for g, o in zip(grads, outs, strict=True)])
    return [o.detach() for o in outs], [x.grad for x in inputs]


def exact(x: Tensor) -> Tensor:
    return x.detach().cpu().double()


USES = (
    "alone",
    "added",
    "kept",
)  # a norm's input: used alone, summed with a residual, returned as a second output


def rms_norm_law(draw: Draw, weight_dtype: torch.dtype, use: str, eps: float = 1e-5) -> None:
    shape = (draw.rows, draw.width)
    x, residual, dy, dtotal, weight = draw.tensors(shape, shape, shape, shape, shape[1:])
    weight = weight.to(weight_dtype)
    if use == "added":
        got, grads = gradients(
            lambda x, r, w: pointwise.add_rms_norm(x, r, w, eps), [x, residual, weight], [dy, dtotal]
        )
        h = x + residual
        assert torch.equal(got[1], h), "the sum"
        assert torch.equal(grads[0], grads[1]), "the residual's gradient is that of x"
    elif use == "kept":
        got, grads = gradients(lambda x, w: pointwise.rms_norm_and_input(x, w, eps), [x, weight], [dy, dtotal])
        h = x
        assert torch.equal(got[1], x), "x once more"
    else:
        got, grads = gradients(lambda x, w: (pointwise.rms_norm(x, w, eps),), [x, weight], [dy])
        h = x
    g, n, w = exact(dy), exact(h), exact(weight)
    r = (n.square().mean(1, keepdim=True) + eps).rsqrt()
    n = n * r
    terms, relative = (draw.width + 2) / 2, (draw.width + 2) / 2 * E + 3 * E  # error of 1 / rms
    assert_within("y", got[0], n * w, relative * (n * w).abs())
    gw = g * w
    mean, absolute = (gw * n).mean(1, keepdim=True), (gw * n).abs().mean(1, keepdim=True)
    back = torch.zeros_like(g) if use == "alone" else exact(dtotal)
    lost = (terms * E + 2 * relative + 3 * E) * r * (gw.abs() + 2 * n.abs() * absolute) + E * back.abs()
    assert_within("dx", grads[0], r * (gw - n * mean) + back, lost)
    lost = ((draw.rows + 2) / 2 * E + relative + E) * (g * n).abs().sum(0)
    assert_within("dweight", grads[-1], (g * n).sum(0), lost)
    if draw.rows and draw.width:
        h = draw.laid_out(h)  # the number of elements summed at once depends on the strides
        again, _ = gradients(lambda x, w: (pointwise.rms_norm(x, w, eps),), [h, weight], [dy])
        assert torch.equal(again[0], got[0]), "the norm of the sum is the norm of what was rounded"


def swiglu_law(draw: Draw) -> None:
    shape = (draw.rows, draw.width)
    gate, up, dy = draw.tensors(shape, shape, shape)
    (y,), (dgate, dup) = gradients(lambda g, u: (pointwise.gated(g, u, "silu"),), [gate, up], [dy])
    g, u, d = exact(gate), exact(up), exact(dy)
    s, silu = torch.sigmoid(g), F.silu(g)
    relative = (5 + g.abs()) * E  # error of the sigmoid
    tiny = torch.finfo(torch.float32).tiny * (1 + g.abs())  # a sigmoid below it is 0: exp overflows
    assert_within("y", y, silu * u, (relative + 2 * E) * (silu * u).abs() + tiny * (u.abs() + 1))
    assert_within("dup", dup, d * silu, (relative + 2 * E) * (d * silu).abs() + tiny * (d.abs() + 1))
    want, absolute = d * u * (s + silu * (1 - s)), (d * u).abs() * (s + silu.abs())
    flushed = 2 * tiny * ((d * u).abs() + 1)
    assert_within("dgate", dgate, want, (2 * relative + 6 * E) * absolute + flushed)


def geglu_law(draw: Draw, act: str) -> None:
    """With s the distribution function, its error is relative to one: 1 + erf cancels, as in torch's own."""
    shape = (draw.rows, draw.width)
    gate, up, dy = draw.tensors(shape, shape, shape)
    (y,), (dgate, dup) = gradients(lambda g, u: (pointwise.gated(g, u, act),), [gate, up], [dy])
    g, u, d = exact(gate).requires_grad_(), exact(up), exact(dy)
    value = F.gelu(g, approximate="tanh" if act == "gelu_pytorch_tanh" else "none")
    (slope,) = torch.autograd.grad(value.sum(), g)
    g, value = g.detach(), value.detach()
    # the argument g c (1 + c' g^2) and its square have a relative error of 4 eps; s' damps it: z s'(z) < 1/2
    lost = 8 * E * g.abs()
    assert_within("y", y, value * u, (lost + E * value.abs()) * u.abs() + E * (value * u).abs())
    assert_within("dup", dup, value * d, (lost + E * value.abs()) * d.abs() + E * (value * d).abs())
    # s by erf or a sigmoid, g s' and its factors: a few eps, since |g| s' < 1 and s' is flat where exp is steep. The
    # sigmoid's 1 - s has an error of eps relative to one, until at an argument of 18 both are negligible.
    inner = 1.5957691216057308 * (1 + 0.134145 * g.square())
    near = (inner * g < 3 * 18) & (g > 0) if act == "gelu_pytorch_tanh" else torch.zeros_like(g, dtype=torch.bool)
    steep = 10 * E + E * (g * inner).where(near, 0.0)
    assert_within("dgate", dgate, slope * d * u, (steep + 3 * E * slope.abs()) * (d * u).abs())


def rope_law(draw: Draw, shared_positions: bool) -> None:
    b, s, d = draw.batch, draw.rows, 2 * draw.width
    shapes = [(b, s, heads, d) for heads in draw.heads]
    q, k, dq, dk = draw.tensors(*shapes, *shapes)
    generator = torch.Generator().manual_seed(draw.seed + 1)
    angles = 100 * torch.rand(1 if shared_positions else b, s, 1, draw.width, generator=generator)
    cos, sin = angles.cos().to(draw.device), angles.sin().to(draw.device)
    outs, grads = gradients(lambda q, k: pointwise.rotate_pair(q, k, cos, sin), [q, k], [dq, dk])
    c, n = exact(cos), exact(sin)
    for name, sign, got, given in (
        ("q", 1, outs[0], q), ("k", 1, outs[1], k), ("dq", -1, grads[0], dq), ("dk", -1, grads[1], dk)
    ):  # fmt: skip
        x1, x2 = exact(given).chunk(2, dim=-1)
        want = torch.cat((x1 * c - sign * x2 * n, x2 * c + sign * x1 * n), -1)
        size = torch.cat(((x1 * c).abs() + (x2 * n).abs(), (x2 * c).abs() + (x1 * n).abs()), -1)
        assert_within(name, got, want, 2 * E * size)
