"""The experts of an MoE layer, with one weight tensor [E, out, in] per projection."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedtp.comm import Group, place
from fusedtp.comm.signature import COMM_DTYPES

from .layout import TokenLayout

GATED = ("silu", "gelu", "gelu_pytorch_tanh")
PLAIN = {
    "none": lambda x: x,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
ON_OVERFLOW = ("error", "rounds")


class Experts(nn.Module):
    """out = sum over a token's choices j, in their order, of weights[:, j] * expert_j(x).

    expert_e(x) = down_e (act(gate_e x) * (up_e x)), or down_e act(up_e x) if `gated` is False.

        x                      [T_r, H]
        expert_ids, weights    [T_r, k]   -1 drops a choice
        gate_proj, up_proj     [E, F, H]  down_proj [E, H, F]; cast to x.dtype
        return                 [T_r, H]

    max_rows       the most rows that this rank's experts can receive
    recv_capacity  the same as a multiple of the even share, T k / W rows for T tokens on all W ranks; with W any
                   routing fits
    on_overflow    if more rows arrive than one of these allows: "error", or "rounds" with that many rows at a time, see
                   fusedtp.moe_rounds. If neither is given, any routing fits; if that needs much memory and kernels run,
                   only two even shares fit, and the rest comes in rounds
    used           RecvUsage of the last call; None if it had no limit, or if overflow raises
    comm_dtype     "" or "fp8": the format in which rows travel to their experts; applies to local experts too
    weights_sum    the value that a token's weights must sum to, checked on CPU; None: any

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
        recv_capacity: float | None = None,
        on_overflow: str = "error",
        weights_sum: float | None = None,
        comm_dtype: str = "",
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
        found = exchange_faults(max_rows, recv_capacity, on_overflow, comm_dtype)
        if found:
            raise ValueError("; ".join(found))
        self.max_rows, self.recv_capacity, self.on_overflow = max_rows, recv_capacity, on_overflow
        self.weights_sum, self.comm_dtype = weights_sum, comm_dtype
        self.used: Any = None
        self.parallel: Any = None

        def weight(out_features: int, in_features: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, out_features, in_features, device=device, dtype=dtype))

        self.gate_proj = weight(hidden, dim) if gated else None
        self.up_proj = weight(hidden, dim)
        self.down_proj = weight(dim, hidden)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A usable initialization; `init_` gives the same model at any world size."""
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor, layout: TokenLayout | None = None) -> Tensor:
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
        """The output, with `own` weights (gate or None, up, down) of this rank's experts; `group` has the others.

        num_experts   number of experts on all ranks, the range of expert_ids
        """
        from fusedtp.ops.moe import (
            Mlp,
            moe_dispatch_gated,
            moe_dispatch_matmul,
            moe_matmul_combine,
            moe_rounds,
            usual_room,
        )

        given = (x, expert_ids, weights)
        parts = 1 if self.parallel is None else self.parallel.shares.tensor_parallel  # of each choice
        total = None if self.weights_sum is None else self.weights_sum * parts
        where: dict[str, Any] = dict(
            sizes=sizes, engine=engine, layer=layer, weights_sum=total, comm_dtype=self.comm_dtype
        )
        gate, up, down = own
        assert up is not None and down is not None
        bound = self._bound(x.shape[0] if sizes is None else sizes, expert_ids.shape[1], group)
        rounds = self.on_overflow == "rounds"
        if bound is None:
            bound = usual_room(group, x, expert_ids, num_experts, sizes, engine)
            rounds = bound is not None
        self.used = None
        if rounds:
            assert bound is not None
            experts = Mlp(gate, up, down, PLAIN[self.act] if gate is None else self.act)
            y, self.used = moe_rounds(*given, num_experts, group, experts, max_rows=bound, **where)
            return y
        where["max_rows"] = bound
        if self.recv_capacity is not None:
            where["limit"] = f"recv_capacity = {self.recv_capacity}"
        if gate is not None:
            hidden, _, handle = moe_dispatch_gated(*given, gate, up, num_experts, group, act=self.act, **where)
        else:
            hidden, _, handle = moe_dispatch_matmul(*given, up, num_experts, group, **where)
            hidden = PLAIN[self.act](hidden)
        return moe_matmul_combine(hidden, down, handle)

    def matmuls(self, rows: Tensor, offsets: Tensor, own: Sequence[Tensor | None]) -> Tensor:
        """rows [R, H] sorted by expert, see grouped_matmul -> [R, H]."""
        from fusedtp.ops.moe import grouped_gated, grouped_matmul

        gate, up, down = own
        assert up is not None and down is not None
        if gate is not None:
            hidden = grouped_gated(rows, gate, up, offsets, act=self.act)
        else:
            hidden = PLAIN[self.act](grouped_matmul(rows, up, offsets))
        return grouped_matmul(hidden, down, offsets)

    @property
    def bounded(self) -> bool:
        """Whether the number of received rows is limited."""
        return self.max_rows is not None or self.recv_capacity is not None

    def _bound(self, tokens: int | Sequence[int], top_k: int, group: Group | None) -> int | None:
        """The most rows a rank can receive, for `tokens` on each rank; the same on all ranks."""
        if self.recv_capacity is None:
            return self.max_rows
        ranks = 1 if group is None else place(group).world_size
        total = tokens * ranks if isinstance(tokens, int) else sum(tokens)
        return max(1, math.ceil(self.recv_capacity * total * top_k / ranks))

    def extra_repr(self) -> str:
        return f"{self.num_experts} x ({self.dim} -> {self.hidden} -> {self.dim}), act={self.act}"


def exchange_faults(max_rows: int | None, recv_capacity: float | None, on_overflow: str, comm_dtype: str) -> list[str]:
    """Descriptions of what is wrong with these options of the exchange."""
    found = []
    if comm_dtype not in COMM_DTYPES:
        found.append(f"comm_dtype is {comm_dtype!r}, must be one of {', '.join(map(repr, COMM_DTYPES))}")
    if on_overflow not in ON_OVERFLOW:
        found.append(f"on_overflow is {on_overflow!r}, must be one of {', '.join(ON_OVERFLOW)}")
    if max_rows is not None and recv_capacity is not None:
        found.append(f"max_rows is {max_rows} and recv_capacity is {recv_capacity}: give one of them")
    if recv_capacity is not None and not 0 < recv_capacity < math.inf:
        found.append(f"recv_capacity is {recv_capacity}, must be positive")
    if on_overflow == "rounds" and max_rows is None and recv_capacity is None:
        found.append("on_overflow is 'rounds', which needs max_rows or recv_capacity")
    if max_rows is not None and max_rows < (on_overflow == "rounds"):
        found.append(f"max_rows is {max_rows}, must be at least {int(on_overflow == 'rounds')}")
    return found
