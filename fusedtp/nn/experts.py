"""The experts of a mixture, one weight tensor a projection, [E, out, in], and what a token's choice of them makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedtp.comm import Group

from .layout import TokenLayout

GATED = ("silu", "gelu", "gelu_pytorch_tanh")
PLAIN = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Experts(nn.Module):
    """out = sum over a token's choices j, in their order, of weights[:, j] * expert_j(x).

    expert_e(x) = down_e (act(gate_e x) * (up_e x)), or down_e act(up_e x) where `gated` is False.

        x                      [T_r, H]
        expert_ids, weights    [T_r, k]   -1 drops a choice
        gate_proj, up_proj     [E, F, H]  down_proj [E, H, F]; cast to x.dtype
        return                 [T_r, H]

    max_rows   room for rows of this rank's experts; None: what any routing needs. See fusedtp.moe_dispatch
    Parallel: this rank has E / W experts, and rows travel; see hooks.py.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        *,
        act: str = "silu",
        gated: bool = True,
        max_rows: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        known = GATED if gated else tuple(PLAIN)
        if act not in known:
            kind = "gated" if gated else "ungated"
            raise ValueError(f"act of {kind} experts is {act!r}; it must be one of {', '.join(known)}")
        if min(dim, hidden, num_experts) < 1:
            raise ValueError(f"dim {dim}, hidden {hidden} and num_experts {num_experts} must be at least 1")
        self.dim, self.hidden, self.num_experts, self.act = dim, hidden, num_experts, act
        self.max_rows = max_rows
        self.parallel: Any = None

        def weight(out_features: int, in_features: int) -> nn.Parameter:
            return nn.Parameter(
                torch.empty(num_experts, out_features, in_features, device=device, dtype=dtype)
            )

        self.gate_proj = weight(hidden, dim) if gated else None
        self.up_proj = weight(hidden, dim)
        self.down_proj = weight(dim, hidden)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A usable start; `init_` is what gives the same model at any world size."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(
        self, x: Tensor, expert_ids: Tensor, weights: Tensor, layout: TokenLayout | None = None
    ) -> Tensor:
        if self.parallel is not None:
            y: Tensor = self.parallel.experts(x, expert_ids, weights, self, layout)
            return y
        own = [None if w is None else w.to(x.dtype) for w in (self.gate_proj, self.up_proj, self.down_proj)]
        return self.compute(x, expert_ids, weights, self.num_experts, own)

    def compute(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        num_experts: int,
        own: Sequence[Tensor | None],
        group: Group | None = None,
        sizes: Sequence[int] | None = None,
        engine: str = "auto",
        layer: str = "",
    ) -> Tensor:
        """With `own` weights (gate or None, up, down) of this rank's experts, the others' on the ranks of `group`.

        num_experts   of all ranks, as expert_ids count them
        """
        from fusedtp.ops.moe import grouped_gated, grouped_matmul, moe_combine, moe_dispatch

        gate, up, down = own
        assert up is not None and down is not None
        rows, offsets, handle = moe_dispatch(
            x, expert_ids, weights, num_experts, group,
            max_rows=self.max_rows, sizes=sizes, engine=engine, layer=layer,
        )  # fmt: skip
        if gate is not None:
            hidden = grouped_gated(rows, gate, up, offsets, act=self.act)
        else:
            hidden = PLAIN[self.act](grouped_matmul(rows, up, offsets))
        return moe_combine(grouped_matmul(hidden, down, offsets), handle)

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.dim} -> {self.hidden} -> {self.dim}), act={self.act}"
