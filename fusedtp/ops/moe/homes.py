"""Where the rows of this rank's experts go back to, as kernels/moe_matmul_combine.py reads it. All on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .plan import Exchange


class Homes(NamedTuple):
    """int32, of this rank's rows in their order, by (expert, source, slot); undefined past the last one.

    to      [max_rows]   the source of each row
    at      [max_rows]   where the row stands in that source's order
    counts  [E]          rows of every expert, of all owners
    """

    to: Tensor
    at: Tensor
    counts: Tensor


def homes(table: Tensor, at: Exchange) -> Homes:
    """table [W, E] -> Homes; shapes are known on the host, values stay on the device."""
    here = slice(at.rank * at.experts_here, (at.rank + 1) * at.experts_here)
    table = table.long()
    sizes = table[:, here].t().reshape(-1)  # of the blocks of rows, by (expert, source)
    places = (table.cumsum(1) - table)[:, here].t().reshape(-1)
    ends = sizes.cumsum(0)
    rows = torch.arange(at.max_rows, device=table.device)
    block = torch.searchsorted(ends, rows, right=True).clamp(max=sizes.shape[0] - 1)
    place = rows + (places - ends + sizes)[block]
    parts = (block % at.world_size, place, table.sum(0))
    return Homes(*(part.to(torch.int32) for part in parts))
