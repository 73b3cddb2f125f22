"""A mixture of experts (MoE) that replaces an MLP."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fusedtp.comm import Group, place

from .capacity import RULES, keep_capacity
from .experts import Experts
from .hooks import parallel_of
from .layout import TokenLayout
from .mlp import GatedMLP
from .router import Router, Routing
from .side_stream import run_on_side_stream


class MoE(nn.Module):
    """y = sum over each token's top_k experts of weight * expert(x), plus the shared expert's output.

        x        [T_r, H]
        layout   needed by some of the router's options; the router's decisions are appended to its `routings`
        return   [T_r, H]

    dim, hidden            H, and the width of each expert
    num_experts, top_k     number of experts, and of experts per token
    shared                 width of a shared MLP for all tokens; 0: none (DeepSeekMoE, Dai et al. 2024)
    split_shared           True: ranks split the shared MLP as any MLP; False: each rank holds it whole and applies it
                           to its own tokens, on a GPU while rows travel
    gated, act             of the experts, see Experts
    capacity, drop         capacity factor of an expert relative to its even share, and which choices it drops beyond
                           ("position" or "probability", see capacity.py); None: no limit. If all choices of a token
                           are dropped, only the residual connection remains
    max_rows, recv_capacity, on_overflow, comm_dtype
                           the number of rows a rank's experts receive, what happens to more rows, and in which form
                           rows travel; see Experts
    options                of the Router: score, normalize, balance_loss, ...

    y does not include the router's losses: the code that computes the loss must add those of `layout.routings`, as
    CausalLM does. Source: Shazeer et al. 2017; Fedus et al. 2021, "Switch Transformers".
    """

    tp_plan = {"experts": "experts"}

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int,
        *,
        shared: int = 0,
        split_shared: bool = False,
        gated: bool = True,
        act: str = "silu",
        capacity: float | None = None,
        drop: str = "position",
        max_rows: int | None = None,
        recv_capacity: float | None = None,
        on_overflow: str = "error",
        comm_dtype: str = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if drop not in RULES:
            raise ValueError(f"drop is {drop!r}, must be one of {', '.join(RULES)}")
        if capacity is not None and not 0 < capacity < math.inf:
            raise ValueError(f"capacity is {capacity}, must be positive")
        self.capacity, self.drop = capacity, drop
        on: dict[str, Any] = dict(device=device, dtype=dtype)
        self.router = Router(dim, num_experts, top_k, **options, **on)
        bound: dict[str, Any] = dict(
            max_rows=max_rows, recv_capacity=recv_capacity, on_overflow=on_overflow, comm_dtype=comm_dtype
        )
        weights_sum = self.router.scale if self.router.normalize else None
        self.experts = Experts(dim, hidden, num_experts, act=act, gated=gated, weights_sum=weights_sum, **bound, **on)
        self.shared = GatedMLP(dim, shared, act, **on) if shared else None
        self.split_shared = split_shared
        if self.shared is not None and split_shared:
            shared_plan = {f"shared.{name}": style for name, style in self.shared.tp_plan.items()}
            self.tp_plan = {**self.tp_plan, **shared_plan}

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        parallel = parallel_of(self.experts)
        sharing = None if parallel is None else parallel.token_group
        balanced = None if layout is None else layout.balance_group
        routing = self.router(x, layout, balanced or sharing, sequence_group=sharing)
        if self.capacity is not None:
            routing = self._bounded(routing, layout, balanced or sharing)

        def routed(x: Tensor) -> Tensor:
            y: Tensor = self.experts(x, routing.expert_ids, routing.weights, layout)
            return y

        shared = self.shared
        if shared is None:
            y = routed(x)
        elif self.split_shared:
            y = routed(x) + shared(x, layout)
        else:
            y = run_on_side_stream(routed, lambda x: shared(x, layout), x)
        if layout is not None and layout.routings is not None:
            layout.routings.append(routing._replace(recv_usage=self.experts.used))
        return y

    def _bounded(self, routing: Routing, layout: TokenLayout | None, group: Group | None) -> Routing:
        """The routing after dropping choices beyond the experts' capacity."""
        assert self.capacity is not None
        sizes = None
        if group is not None and layout is not None and layout.sizes:
            sizes = layout.sizes * (place(group).world_size // len(layout.sizes))
        kept = keep_capacity(
            routing.expert_ids,
            routing.weights,
            self.experts.num_experts,
            self.capacity,
            by=self.drop,
            group=group,
            sizes=sizes,
        )
        return routing._replace(expert_ids=kept.expert_ids, weights=kept.weights, dropped=kept.dropped)
