"""A plan as kernels read it: where segments begin, and where the rows of a slot belong. All on the device.

n[s, o]      rows from source s to owner o, a segment
begins       [W + 1]      this rank's order: where the segment for each owner begins, and where the last one ends
sources      [W + 1]      this rank's rows by (source, expert, slot): where the segment of each source begins
at_owners    [W]          where this rank's segment begins among each owner's rows, so ordered
in_sources   [W]          where this rank's segment begins in each source's order
totals       [W]          rows of each owner
blocks       [W * E_r + 1]   so ordered: where the rows of each source for each expert begin
arrivals     [max_rows]   by (source, expert, slot) -> by (expert, source, slot)
origins      [max_rows]   and back
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .plan import Exchange


class Layout(NamedTuple):
    """int32 views of one tensor; see above."""

    begins: Tensor
    sources: Tensor
    at_owners: Tensor
    in_sources: Tensor
    totals: Tensor
    blocks: Tensor
    arrivals: Tensor
    origins: Tensor


def _lengths(at: Exchange) -> list[int]:
    w = at.world_size
    return [w + 1, w + 1, w, w, w, w * at.experts_here + 1, at.max_rows, at.max_rows]


def layout_size(at: Exchange) -> int:
    """Elements of what `packed` makes."""
    return sum(_lengths(at))


def packed(table: Tensor, at: Exchange) -> Tensor:
    """table [W, E] -> int32 [layout_size]; shapes are known on the host, values stay on the device."""
    w, r, each = at.world_size, at.rank, at.experts_here
    table = table.long()
    n = table.view(w, w, each).sum(2)
    begins, sources = _begins(n[r]), _begins(n[:, r])
    at_owners = (n.cumsum(0) - n)[r]
    in_sources = (n.cumsum(1) - n)[:, r]
    mine = table[:, r * each : (r + 1) * each]
    by_source, by_expert = _begins(mine.reshape(-1)), _begins(mine.t().reshape(-1))
    arrivals = _moved(by_source, by_expert[:-1].view(each, w).t(), at.max_rows)
    origins = _moved(by_expert, by_source[:-1].view(w, each).t(), at.max_rows)
    parts = [begins, sources, at_owners, in_sources, n.sum(0), by_source, arrivals, origins]
    return torch.cat(parts).to(torch.int32)


def unpacked(words: Tensor, at: Exchange) -> Layout:
    """What `packed` made."""
    return Layout(*words.split(_lengths(at)))


def _begins(counts: Tensor) -> Tensor:
    """[n] -> [n + 1]: where each begins, and where the last one ends."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _moved(begins: Tensor, targets: Tensor, rows: int) -> Tensor:
    """[rows]: where each goes if block b, which begins at begins[b], begins at targets.flatten()[b]."""
    row = torch.arange(rows, device=begins.device)
    block = torch.searchsorted(begins[1:], row, right=True).clamp(max=begins.shape[0] - 2)
    return targets.reshape(-1)[block] + row - begins[block]
