"""Differentiable exchange of token rows between ranks, without a matmul.

Each function is a linear map over all ranks, and its backward is the transpose of that map. The upstream gradient on a
rank is either a part of the sum ("partial") or the same on all ranks ("replicated"). `layer` is the kind of layer that
calls are counted for.

    forward                  backward, given a gradient that is
    gather_tokens            this rank's rows, replicated
    all_gather_tokens, _of   a reduce-scatter, partial
    take_tokens              a gather, of each rank's own rows
    reduce_scatter_tokens    a gather, of each rank's own rows
    copy_to_group            a sum over ranks, partial
    all_reduce_sum           unchanged, replicated
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm import Group, place

from .operation import Spec
from .rows import Rows, split
from .shards import (
    all_gather_rows,
    all_gather_tensors,
    all_reduce_rows,
    reduce_scatter_rows,
    reduce_scatter_tensors,
)


def gather_tokens(x: Tensor, group: Group, sizes: Sequence[int], layer: str = "") -> Tensor:
    """x [T_r, ...] -> [T, ...] on every rank; the gradient is replicated, and each rank takes its own rows of it."""
    full = _Gather.apply(_as_rows(x), _spec(group, sizes, layer))
    return full.reshape(full.shape[0], *x.shape[1:])


def all_gather_tokens(x: Tensor, group: Group, sizes: Sequence[int], layer: str = "") -> Tensor:
    """x [T_r, ...] -> [T, ...] on every rank; the gradient is partial: each rank gets the sum for its own rows."""
    full = _AllGather.apply(_as_rows(x), _spec(group, sizes, layer))
    return full.reshape(full.shape[0], *x.shape[1:])


def all_gather_tokens_of(xs: Sequence[Tensor], group: Group, sizes: Sequence[int], layer: str = "") -> list[Tensor]:
    """all_gather_tokens for several tensors in one call; the backward is one call too. Integers have no gradient."""
    if len(xs) == 1:
        return [all_gather_tokens(xs[0], group, sizes, layer)]
    fulls = _AllGatherTensors.apply(_spec(group, sizes, layer), *map(_as_rows, xs))
    return [full.reshape(full.shape[0], *x.shape[1:]) for full, x in zip(fulls, xs, strict=True)]


def take_tokens(x: Tensor, group: Group, sizes: Sequence[int], layer: str = "") -> Tensor:
    """x [T, ...], the same on every rank -> this rank's rows [T_r, ...]. The backward gathers the ranks' gradients."""
    own = _Take.apply(_as_rows(x), _spec(group, sizes, layer))
    return own.reshape(own.shape[0], *x.shape[1:])


def reduce_scatter_tokens(x: Tensor, group: Group, sizes: Sequence[int], layer: str = "") -> Tensor:
    """x [T, ...], partial -> [T_r, ...], summed over ranks. The backward gathers."""
    part = _ReduceScatter.apply(_as_rows(x), _spec(group, sizes, layer))
    return part.reshape(part.shape[0], *x.shape[1:])


def copy_to_group(x: Tensor, group: Group, layer: str = "") -> Tensor:
    """The identity; its backward sums the ranks' partial gradients."""
    return _Copy.apply(x, _spec_of_all(x, group, layer))


def all_reduce_sum(x: Tensor, group: Group, layer: str = "") -> Tensor:
    """The sum over ranks; the gradient is replicated and passes unchanged."""
    return _all_reduce(x, _spec_of_all(x, group, layer))


def _spec(group: Group, sizes: Sequence[int], layer: str) -> Spec:
    at = place(group)
    return Spec(at.name, at.rank, tuple(sizes), layer=layer)


def _spec_of_all(x: Tensor, group: Group, layer: str) -> Spec:
    at = place(group)
    return Spec(at.name, at.rank, split(_as_rows(x).shape[0], at.world_size), layer=layer)


def _as_rows(x: Tensor) -> Tensor:
    """x [T, ...] -> [T, N], even without elements; a scalar -> [1, 1]."""
    return x.flatten(1) if x.dim() > 1 else x.reshape(x.numel(), 1)


def _own(x: Tensor, spec: Spec) -> Tensor:
    begin = Rows(spec.sizes).offset(spec.rank)
    return x[begin : begin + spec.sizes[spec.rank]].clone()


def _all_reduce(x: Tensor, spec: Spec) -> Tensor:
    records = x.requires_grad and torch.is_grad_enabled()
    return _Sum.apply(x, spec) if records else _summed(x, spec)


def _summed(x: Tensor, spec: Spec) -> Tensor:
    return all_reduce_rows(spec, _as_rows(x)).reshape(x.shape)


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec) -> Tensor:
        ctx.spec = spec
        return all_gather_rows(spec, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _own(dy, ctx.spec), None


class _AllGather(Function):
    """Like _Gather, but with a partial gradient: the transpose of _ReduceScatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec) -> Tensor:
        ctx.spec = spec
        return all_gather_rows(spec, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _ReduceScatter.apply(dy.contiguous(), ctx.spec), None


class _AllGatherTensors(Function):
    """Takes (spec, *xs) as one parameter: Dynamo drops ctx from a call with as many arguments as parameters."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        ctx.spec, *xs = given
        ctx.set_materialize_grads(False)
        fulls = all_gather_tensors(ctx.spec, xs)
        ctx.mark_non_differentiable(*(full for full in fulls if not full.is_floating_point()))
        return tuple(fulls)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = zip(dys, ctx.needs_input_grad[1:], strict=True)
        there = {i: dy.contiguous() for i, (dy, needed) in enumerate(needs) if dy is not None and needed}
        dxs = dict(zip(there, _reduce_scatter_each(ctx.spec, list(there.values())), strict=True))
        return None, *map(dxs.get, range(len(dys)))


def _reduce_scatter_each(spec: Spec, xs: list[Tensor]) -> Sequence[Tensor]:
    if len(xs) < 2:
        return [_ReduceScatter.apply(x, spec) for x in xs]
    ys: Sequence[Tensor] = _ReduceScatterTensors.apply(spec, *xs)
    return ys


class _ReduceScatterTensors(Function):
    """Takes (spec, *xs) as one parameter, like _AllGatherTensors."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        ctx.spec, *xs = given
        ctx.set_materialize_grads(False)
        return tuple(reduce_scatter_tensors(ctx.spec, xs))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *(None if dy is None else _AllGather.apply(dy.contiguous(), ctx.spec) for dy in dys)


class _Take(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec) -> Tensor:
        ctx.spec = spec
        return _own(x, spec)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _AllGather.apply(dy.contiguous(), ctx.spec), None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec) -> Tensor:
        ctx.spec = spec
        return reduce_scatter_rows(spec, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _AllGather.apply(dy.contiguous(), ctx.spec), None


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec) -> Tensor:
        ctx.spec = spec
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(dy, ctx.spec), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: Spec) -> Tensor:
        return _summed(x, spec)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None
