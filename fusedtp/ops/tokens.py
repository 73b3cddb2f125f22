"""Differentiable movers of token rows between ranks, without a matmul.

Each is a linear map on the whole world, and its backward is that map's transpose, given what the gradient is on each
rank: a part of the sum ("partial") or the same on all ranks ("replicated").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm import Group, place

from . import library as _library
from .rows import Rows

assert _library


def gather_tokens(x: Tensor, group: Group, sizes: Sequence[int], grad: str = "sum") -> Tensor:
    """x [T_r, ...] -> [T, ...] on every rank.

    grad="sum": the gradient is partial and is reduce-scattered. grad="slice": it is replicated, and a rank takes its
    own rows. Raises ValueError for another `grad`.
    """
    if grad not in ("sum", "slice"):
        raise ValueError(f"grad is {grad!r}; it must be 'sum' or 'slice'")
    at = place(group)
    flat = _as_rows(x)
    if grad == "slice":
        full = _GatherSlice.apply(flat, at.name, at.rank, tuple(sizes))
    else:
        full = torch.ops.fusedtp.all_gather_rows(flat, at.name, at.rank, tuple(sizes), 1)
    return full.reshape(full.shape[0], *x.shape[1:])


def scatter_tokens(x: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
    """x [T, ...], replicated -> this rank's [T_r, ...]. The backward gathers: every rank has all rows' gradient."""
    at = place(group)
    flat = _as_rows(x)
    part = _Scatter.apply(flat, at.name, at.rank, tuple(sizes))
    return part.reshape(part.shape[0], *x.shape[1:])


def reduce_scatter_tokens(x: Tensor, group: Group, sizes: Sequence[int]) -> Tensor:
    """x [T, ...], partial -> [T_r, ...], summed over ranks. The backward gathers."""
    at = place(group)
    flat = _as_rows(x)
    part = torch.ops.fusedtp.reduce_scatter_rows(flat, at.name, at.rank, tuple(sizes), 1)
    return part.reshape(part.shape[0], *x.shape[1:])


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """The identity; its backward sums the ranks' partial gradients."""
    return _Copy.apply(x, place(group).name)


def all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks; the gradient is replicated and passes unchanged."""
    flat = _as_rows(x)
    return torch.ops.fusedtp.all_reduce_rows(flat, place(group).name).reshape(x.shape)


def _as_rows(x: Tensor) -> Tensor:
    """x [T, ...] -> [T, N], also with no elements; a scalar -> [1, 1]."""
    return x.flatten(1) if x.dim() > 1 else x.reshape(x.numel(), 1)


def _own(full: Tensor, rank: int, sizes: tuple[int, ...]) -> Tensor:
    begin = Rows(sizes).offset(rank)
    return full[begin : begin + sizes[rank]].clone()


class _GatherSlice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, rank: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.rank, ctx.sizes = rank, sizes
        return torch.ops.fusedtp.all_gather_rows(x, group, rank, sizes, 1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return _own(dy, ctx.rank, ctx.sizes), None, None, None


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, rank: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.rank, ctx.sizes = group, rank, sizes
        return _own(x, rank, sizes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return (
            torch.ops.fusedtp.all_gather_rows(dy.contiguous(), ctx.group, ctx.rank, ctx.sizes, 1),
            None,
            None,
            None,
        )


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        flat = _as_rows(dy)
        return torch.ops.fusedtp.all_reduce_rows(flat, ctx.group).reshape(dy.shape), None
