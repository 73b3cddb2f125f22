"""act(g) * u of an expert's two products, and its gradients, in torch: in fp32 (fp64), each rounded once.

On a CPU in stretches that a core's cache holds: nothing of the tensors' size is allocated beside the results, whose
pages would have to be faulted in and whose passes would go to memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..matmul import is_16_bit
from .weigh import accumulator, stretches


def forward(g: Tensor, u: Tensor, act: str, out: Tensor | None = None) -> Tensor:
    """g, u [R, N] -> act(g) * u, in `out` if given."""
    out = torch.empty_like(g) if out is None else out
    for some in stretches(g.shape[0], g.shape[1], accumulator(g.dtype), g.device):
        into, there = out[some], u[some]
        if not is_16_bit(g.dtype):
            _activate(g[some], act, into).mul_(there)
            continue
        wide = g[some].float()
        into.copy_(_activate(wide, act, wide).mul_(there.float()))
    return out


def backward(dy: Tensor, g: Tensor, u: Tensor, act: str, dg: Tensor, du: Tensor) -> None:
    """dy, g, u [R, N] -> dg = dy u act'(g) and du = dy act(g), both written in place."""
    for some in stretches(g.shape[0], g.shape[1], accumulator(g.dtype), g.device):
        grad, gate, up, into_g, into_u = (t[some] for t in (dy, g, u, dg, du))
        if is_16_bit(g.dtype):
            grad, gate, up = grad.float(), gate.float(), up.float()
        slope, value = _slope_and_value(gate, act)
        torch.mul(value, grad, out=into_u) if value.dtype == g.dtype else into_u.copy_(value.mul_(grad))
        slope.mul_(grad)
        torch.mul(slope, up, out=into_g) if slope.dtype == g.dtype else into_g.copy_(slope.mul_(up))


def _activate(x: Tensor, act: str, out: Tensor) -> Tensor:
    """act(x) in `out`, which may be x."""
    if act == "silu":
        y: Tensor = torch.ops.aten.silu.out(x, out=out)
    else:
        y = torch.ops.aten.gelu.out(x, approximate=_approximate(act), out=out)
    return y


def _slope_and_value(x: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """(act'(x), act(x))."""
    if act != "silu":
        how = _approximate(act)
        return torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate=how), F.gelu(
            x, approximate=how
        )
    part = torch.sigmoid(x)  # one exponential for both: the slope of x s is s + x s (1 - s)
    value = part * x
    return (1 - part).mul_(value).add_(part), value


def _approximate(act: str) -> str:
    return "tanh" if act == "gelu_pytorch_tanh" else "none"
