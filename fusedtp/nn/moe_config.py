"""The MoE configuration of a causal language model's layers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal


@dataclass(frozen=True)
class MoEConfig:
    """Replaces a layer's MLP by an MoE; fields not listed here are documented in `MoE` and `Router`.

    hidden         width of each expert
    shared         width of the shared expert, 0 for none
    split_shared   whether ranks split the shared expert; see MoE
    first_dense    number of first layers that keep their MLP
    """

    num_experts: int = 8
    top_k: int = 2
    hidden: int = 352
    shared: int = 0
    split_shared: bool = False
    first_dense: int = 0
    capacity: float | None = None
    drop: Literal["position", "probability"] = "position"
    max_rows: int | None = None
    recv_capacity: float | None = None
    on_overflow: Literal["error", "rounds"] = "error"
    comm_dtype: Literal["", "fp8"] = ""
    score: Literal["softmax", "sigmoid"] = "softmax"
    score_after_topk: bool = False
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["top2", "max"] = "top2"
    bias: bool = False
    sinkhorn: int = 0
    jitter: float = 0.0
    balance_loss: float = 0.01
    balance: Literal["switch", "gshard"] = "switch"
    sequence_loss: float = 0.0
    z_loss: float = 0.0

    def faults(self) -> list[str]:
        """Descriptions of everything that is wrong."""
        from .experts import exchange_faults
        from .router import Router

        found = [
            f"{name} is {getattr(self, name)}, must not be negative"
            for name in ("shared", "first_dense")
            if getattr(self, name) < 0
        ]
        if self.capacity is not None and not self.capacity > 0:
            found.append(f"capacity is {self.capacity}, must be positive")
        found += exchange_faults(**self.exchange)
        if self.hidden < 1:
            found.append(f"hidden is {self.hidden}, must be at least 1")
        try:
            Router(1, self.num_experts, self.top_k, **self.router, device="meta")
        except ValueError as error:
            found.append(str(error))
        return found

    @property
    def exchange(self) -> dict[str, Any]:
        """The options of Experts for the exchange of rows."""
        return {name: getattr(self, name) for name in ("max_rows", "recv_capacity", "on_overflow", "comm_dtype")}

    @property
    def router(self) -> dict[str, Any]:
        """The Router's options."""
        own = {
            "num_experts", "top_k", "hidden", "shared", "split_shared", "first_dense", "capacity", "drop",
            *self.exchange,
        }  # fmt: skip
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in own}
