"""The router's matmul in fp32 or wider, without saving its input in that dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedtp.ops.first_order import first_order


class WideLogits(torch.autograd.Function):
    """x @ w.T in a wider dtype; x is saved in its original dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x.to(wide) @ weight.to(wide).t()

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = (dy @ weight.to(dy.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
        dweight = (dy.t() @ x.to(dy.dtype)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight, None
