"""A layer of experts as it is written without a library: sort, all_to_all_single, a matmul an expert, and back.

Its matmuls are those of fusedtp's single-device layers, unless it is given others: what is compared is how rows travel
and are put in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fusedtp.nn.linear import linear

Linear = Callable[[Tensor, Tensor], Tensor]  # x [T, K], weight [N, K] -> [T, N]


class _AllToAll(torch.autograd.Function):
    """Rows for each rank in turn -> rows of each rank in turn; backward the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way = received, sent, group
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        sent, received, group = ctx.way
        dx = dy.new_empty(sum(received), dy.shape[1])
        dist.all_to_all_single(dx, dy.contiguous(), received, sent, group=group)
        return dx, None, None, None


class _Permute(torch.autograd.Function):
    """x[order]; backward by the inverse, where indexing would add up rows in a buffer of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return dy.index_select(0, ctx.inverse), None, None


def layer(
    x: Tensor, ids: Tensor, weights: Tensor, own: Sequence[Tensor], group: Any, by: Linear = linear
) -> Tensor:
    """x [T_r, H], ids and weights [T_r, k], gate and up [E_r, F, H] and down [E_r, H, F] of this rank -> [T_r, H]."""
    world, here, k = dist.get_world_size(group), own[0].shape[0], ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=world * here)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)  # [W, E_r]: of each source for each expert here
    sent = counts.view(world, here).sum(1).tolist()
    received = theirs.view(world, here).sum(1).tolist()
    arrived = _AllToAll.apply(x[order // k], sent, received, group)
    by_expert = torch.arange(here).repeat(world).repeat_interleave(theirs).argsort(stable=True)
    back, places = _inverse(by_expert), _inverse(order)
    rows = _Permute.apply(arrived, by_expert, back).split(theirs.view(world, here).sum(0).tolist())
    outs = [_expert(by, part, *each) for part, *each in zip(rows, *own, strict=True)]
    returned = _AllToAll.apply(_Permute.apply(torch.cat(outs), back, by_expert), received, sent, group)
    parts = _Permute.apply(returned, places, order).view(*ids.shape, -1)
    return (parts * weights[..., None].to(parts.dtype)).sum(1)


def _inverse(order: Tensor) -> Tensor:
    """Of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return inverse


def _expert(by: Linear, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return by(F.silu(by(x, gate)) * by(x, up), down)


def reference(x: Tensor, ids: Tensor, weights: Tensor, experts: Sequence[tuple[Tensor, ...]]) -> Tensor:
    """The same in fp64 for a few tokens x [n, H], expert by expert; `experts` holds (gate, up, down) of all of them."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for e, own in enumerate(experts):
        gate, up, down = (w.double() for w in own)
        token, choice = (ids == e).nonzero(as_tuple=True)
        h = x[token].double()
        y = (F.silu(h @ gate.t()) * (h @ up.t())) @ down.t()
        out.index_add_(0, token, y * weights[token, choice, None].double())
    return out
