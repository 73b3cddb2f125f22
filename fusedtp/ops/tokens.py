"""Differentiable movers of token rows between ranks, without a matmul.

Each is a linear map on the whole world, and its backward is that map's transpose, given what the gradient is on each
rank: a part of the sum ("partial") or the same on all ranks ("replicated"). `layer` is the kind of layer that calls
are counted for.
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


def gather_tokens(x: Tensor, group: Group, sizes: Sequence[int], layer: str = "") -> Tensor:
    """x [T_r, ...] -> [T, ...] on every rank; the gradient is replicated, and a rank takes its own rows of it."""
    at = place(group)
    full = _Gather.apply(_as_rows(x), at.name, at.rank, tuple(sizes), layer)
    return full.reshape(full.shape[0], *x.shape[1:])


def take_tokens(x: Tensor, group: Group, sizes: Sequence[int], layer: str = "") -> Tensor:
    """x [T, ...], the same on every rank -> this rank's rows [T_r, ...]. The backward gathers the ranks' gradients."""
    at = place(group)
    own = _Take.apply(_as_rows(x), at.name, at.rank, tuple(sizes), layer)
    return own.reshape(own.shape[0], *x.shape[1:])


def reduce_scatter_tokens(x: Tensor, group: Group, sizes: Sequence[int], layer: str = "") -> Tensor:
    """x [T, ...], partial -> [T_r, ...], summed over ranks. The backward gathers."""
    at = place(group)
    flat = _as_rows(x)
    part = torch.ops.fusedtp.reduce_scatter_rows(flat, at.name, at.rank, tuple(sizes), 1, layer)
    return part.reshape(part.shape[0], *x.shape[1:])


def copy_to_group(x: Tensor, group: Group, layer: str = "") -> Tensor:
    """The identity; its backward sums the ranks' partial gradients."""
    return _Copy.apply(x, place(group).name, layer)


def all_reduce_sum(x: Tensor, group: Group, layer: str = "") -> Tensor:
    """The sum over ranks; the gradient is replicated and passes unchanged."""
    flat = _as_rows(x)
    return torch.ops.fusedtp.all_reduce_rows(flat, place(group).name, layer).reshape(x.shape)


def _as_rows(x: Tensor) -> Tensor:
    """x [T, ...] -> [T, N], also with no elements; a scalar -> [1, 1]."""
    return x.flatten(1) if x.dim() > 1 else x.reshape(x.numel(), 1)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, rank: int, sizes: tuple[int, ...], layer: str) -> Tensor:
        ctx.rank, ctx.sizes = rank, sizes
        return torch.ops.fusedtp.all_gather_rows(x, group, rank, sizes, 1, layer)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        begin = Rows(ctx.sizes).offset(ctx.rank)
        return dy[begin : begin + ctx.sizes[ctx.rank]].clone(), None, None, None, None


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, rank: int, sizes: tuple[int, ...], layer: str) -> Tensor:
        ctx.given = group, rank, sizes, 1, layer
        begin = Rows(sizes).offset(rank)
        return x[begin : begin + sizes[rank]].clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return torch.ops.fusedtp.all_gather_rows(dy.contiguous(), *ctx.given), None, None, None, None


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, layer: str) -> Tensor:
        ctx.group, ctx.layer = group, layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        flat = _as_rows(dy)
        return torch.ops.fusedtp.all_reduce_rows(flat, ctx.group, ctx.layer).reshape(dy.shape), None, None
