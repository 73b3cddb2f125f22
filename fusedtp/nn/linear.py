"""Linear layers whose weights are cast to the activations' dtype at use.

fp32 parameters with bf16 activations then compute in bf16, and the optimizer still updates fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedtp.ops.first_order import first_order

from .hooks import parallel_of
from .layout import TokenLayout


class Linear(nn.Module):
    """y = x @ w.T + b.

    x        [T, K]   any float dtype
    weight   [N, K]   cast to x.dtype
    return   [T, N]
    forward: one matmul; dgrad: dy @ w; wgrad: dy.T @ x. Parallel: see hooks.py.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parallel: Any = None
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A usable start; `init_` is what gives the same model at any world size."""
        nn.init.normal_(self.weight, std=0.02)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        if self.parallel is not None:
            return self.parallel.linear(x, self, layout)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.weight.to(x.dtype), bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear; 16-bit on a CPU without 16-bit instructions by the matmuls of ops/matmul.py, ten times faster."""
    if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
        from fusedtp.ops.matmul import widens

        if widens(x) and not torch.compiler.is_compiling():
            y: Tensor = _WideLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
            return y.view(*x.shape[:-1], y.shape[-1])
    return F.linear(x, weight, bias)


class _WideLinear(torch.autograd.Function):
    """F.linear of [T, K]; see Note [16-bit matmuls on CPU] in ops/matmul.py."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from fusedtp.ops.matmul import matmul

        ctx.save_for_backward(x, weight)
        return matmul(x, weight.t(), bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        from fusedtp.ops.matmul import matmul

        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            matmul(dy, weight) if wants_x else None,
            matmul(dy.t(), x) if wants_weight else None,
            dy.sum(0, dtype=torch.float32).to(dy.dtype) if wants_bias else None,
        )


def project(
    x: Tensor,
    linears: Sequence[nn.Module],
    layout: TokenLayout | None = None,
    gathering: Callable[..., tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, ...]:
    """All linears on the same x; when they are parallel, x is gathered once for all of them.

    x          [T_r, K]
    gathering  the operation that does it where x is gathered, in place of all_gather_matmul
    return     one [T, N_i] for each linear (N_i: this rank's columns), or what `gathering` returns
    """
    parallel = parallel_of(linears[0])
    if parallel is not None:
        return parallel.project(x, linears, layout, gathering)
    return tuple(linear(x) for linear in linears)
