"""Rows to the experts and back where all experts are here. Nothing waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedtp.comm import Communicator

from .plan import Exchange, Plan


def move(
    comm: Communicator | None, x: Tensor, scalars: Tensor | None, plan: Plan, at: Exchange
) -> tuple[Tensor, Tensor]:
    """x [T, K], scalars [T, k] of the slots -> rows [max_rows, K] and the scalars of each [max_rows], else [0]."""
    order = plan.orders[: at.max_rows]
    rows = x.index_select(0, order // at.top_k)
    return rows, x.new_empty(0) if scalars is None else scalars.reshape(-1).index_select(0, order)


def pull(comm: Communicator | None, rows: Tensor, plan: Plan, at: Exchange) -> Tensor:
    """rows [max_rows, N] -> [T * k, N] of the slots in their order; dropped ones are zero."""
    slots = torch.arange(at.tokens * at.top_k, device=rows.device)[:, None]
    rows = torch.nn.functional.pad(rows, (0, 0, 0, slots.shape[0] - at.max_rows))
    return torch.where(slots < plan.table.sum(), rows, 0)
