"""The gated feed-forward layer: SwiGLU, or GeGLU with another activation."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedtp.ops import pointwise
from fusedtp.ops.all_gather_gated_matmul import all_gather_gated_matmul
from fusedtp.ops.first_order import first_order

from .config import ModelConfig
from .layout import TokenLayout
from .linear import Linear, project


class GatedMLP(nn.Module):
    """y = down(act(gate(x)) * up(x)).

    x        [T_r, H]
    act      "silu", "gelu" or "gelu_pytorch_tanh", as transformers calls them
    return   [T_r, H]
    Raises ValueError for another activation. Source: Shazeer 2020.
    """

    tp_plan = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
    gathering = dict.fromkeys(("gate_proj", "up_proj"), "all_gather_gated_matmul")

    def __init__(
        self,
        dim: int,
        hidden: int,
        act: str = "silu",
        bias: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if act not in pointwise.ACTIVATIONS:
            raise ValueError(f"act of a gated MLP is {act!r}; it must be one of {', '.join(pointwise.ACTIVATIONS)}")
        self.hidden_act = act
        self.gate_proj = Linear(dim, hidden, bias, device=device, dtype=dtype)
        self.up_proj = Linear(dim, hidden, bias, device=device, dtype=dtype)
        self.down_proj = Linear(hidden, dim, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        gathering = partial(all_gather_gated_matmul, act=self.hidden_act)
        hidden, *up = project(x, (self.gate_proj, self.up_proj), layout, gathering)
        if up:  # x was not gathered, so the fused operation did not run
            hidden = gated(hidden, up[0], self.hidden_act)
        return self.down_proj(hidden, layout)


class MLP(GatedMLP):
    """The gated feed-forward layer, built from a model's configuration."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            config.hidden_size,
            config.intermediate_size,
            config.hidden_act,
            config.mlp_bias,
            device=device,
            dtype=dtype or config.parameter_dtype,
        )


def gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) * up, elementwise."""
    if act in pointwise.ACTIVATIONS and pointwise.serves(gate, up):
        return pointwise.gated(gate, up, act)
    if act == "silu":
        if torch.compiler.is_compiling():
            return F.silu(gate) * up
        return _SiluMul.apply(gate, up)
    return F.gelu(gate, approximate="tanh" if act == "gelu_pytorch_tanh" else "none") * up


class _SiluMul(torch.autograd.Function):
    """silu(gate) * up that saves only its two inputs and allocates only what it returns."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy * up, gate), F.silu(gate).mul_(dy)
