"""The operations as torch custom ops (group by name), with fakes and autograd.

    fusedtp::all_gather_matmul       x [L, K], w_i [N_i, K], b_i -> y_i [T, N_i], and the gathered x if `keep`
    fusedtp::matmul_reduce_scatter   x_j [T, K_j], w_j [N, K_j], b -> y [L, N]
    fusedtp::matmul_all_reduce       x [T, K], w [N, K], b -> y [T, N]
    fusedtp::all_gather_wgrad        x [L, K], dy_i [T, N_i] -> dw_i [N_i, K] of x's dtype, or fp32
    fusedtp::all_gather_rows         x [L, N] -> [T, N];   fusedtp::reduce_scatter_rows   [T, N] -> [L, N]
    fusedtp::all_reduce_rows         [T, N] -> [T, N]

L = batch * sizes[rank] rows here, T = batch * sum(sizes). `needs_grad` (a bit mask of the inputs) takes part in the
signature that ranks compare; `layer` names the kind of layer that a call is counted for; `biased` is a bit mask of the
weights that have a bias (an optional tensor in a list gets no gradient from torch.library). The autograd registered
here is what torch.compile and opcheck see: one node with all gradients. Eager code goes through autograd.py, whose
nodes keep dgrad and wgrad apart; both call gradients.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm import communicator

from . import all_gather_matmul as _agmm
from . import all_gather_wgrad as _wgrad
from . import gradients, movers
from . import matmul_all_reduce as _mmar
from . import matmul_reduce_scatter as _mmrs
from .first_order import first_order
from .matmul import matmul
from .ordered import ordered
from .rows import Rows


def as_given(x: Tensor) -> AbstractContextManager[Any]:
    """Compute in the operands' dtype: what autocast wants has been done to them in api.py."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@torch.library.custom_op("fusedtp::all_gather_matmul", mutates_args=())
def all_gather_matmul(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: int,
    group: str,
    rank: int,
    sizes: Sequence[int],
    batch: int,
    engine: str,
    needs_grad: int,
    keep: bool,
    layer: str,
) -> list[Tensor]:
    rows = Rows(tuple(sizes), batch)
    given = iter(biases)
    every = [next(given) if biased >> i & 1 else None for i in range(len(weights))]
    with as_given(x):
        outs, full = _agmm.run(communicator(group), x, weights, every, rows, engine, needs_grad, keep, layer)
    return [*outs, full] if full is not None else outs


@all_gather_matmul.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    biased: int,
    group: str,
    rank: int,
    sizes: Sequence[int],
    batch: int,
    engine: str,
    needs_grad: int,
    keep: bool,
    layer: str,
) -> list[Tensor]:
    total = batch * sum(sizes)
    outs = [x.new_empty(total, w.shape[0]) for w in weights]
    return [*outs, x.new_empty(total, x.shape[1])] if keep else outs


@torch.library.custom_op("fusedtp::matmul_reduce_scatter", mutates_args=())
def matmul_reduce_scatter(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    group: str,
    rank: int,
    sizes: Sequence[int],
    batch: int,
    engine: str,
    needs_grad: int,
    layer: str,
) -> Tensor:
    with as_given(xs[0]):
        return _mmrs.run(
            communicator(group), xs, weights, bias, Rows(tuple(sizes), batch), engine, needs_grad, layer
        )


@matmul_reduce_scatter.register_fake
def _(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    group: str,
    rank: int,
    sizes: Sequence[int],
    batch: int,
    engine: str,
    needs_grad: int,
    layer: str,
) -> Tensor:
    return xs[0].new_empty(batch * sizes[rank], weights[0].shape[0])


@torch.library.custom_op("fusedtp::matmul_all_reduce", mutates_args=())
def matmul_all_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    engine: str,
    needs_grad: int,
    layer: str,
) -> Tensor:
    with as_given(x):
        return _mmar.run(communicator(group), x, weight, bias, engine, needs_grad, layer)


@matmul_all_reduce.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    engine: str,
    needs_grad: int,
    layer: str,
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("fusedtp::all_gather_wgrad", mutates_args=())
def all_gather_wgrad(
    x: Tensor,
    dys: Sequence[Tensor],
    group: str,
    sizes: Sequence[int],
    batch: int,
    engine: str,
    layer: str,
    dtype: torch.dtype,
) -> list[Tensor]:
    with as_given(x):
        return _wgrad.run(communicator(group), x, dys, Rows(tuple(sizes), batch), engine, layer, dtype)


@all_gather_wgrad.register_fake
def _(
    x: Tensor,
    dys: Sequence[Tensor],
    group: str,
    sizes: Sequence[int],
    batch: int,
    engine: str,
    layer: str,
    dtype: torch.dtype,
) -> list[Tensor]:
    return [x.new_empty(dy.shape[1], x.shape[1], dtype=dtype) for dy in dys]


@torch.library.custom_op("fusedtp::all_gather_rows", mutates_args=())
def all_gather_rows(x: Tensor, group: str, rank: int, sizes: Sequence[int], batch: int, layer: str) -> Tensor:
    return movers.all_gather(communicator(group), x, Rows(tuple(sizes), batch), layer)


@all_gather_rows.register_fake
def _(x: Tensor, group: str, rank: int, sizes: Sequence[int], batch: int, layer: str) -> Tensor:
    return x.new_empty(batch * sum(sizes), x.shape[1])


@torch.library.custom_op("fusedtp::reduce_scatter_rows", mutates_args=())
def reduce_scatter_rows(
    x: Tensor, group: str, rank: int, sizes: Sequence[int], batch: int, layer: str
) -> Tensor:
    return movers.reduce_scatter(communicator(group), x, Rows(tuple(sizes), batch), layer)


@reduce_scatter_rows.register_fake
def _(x: Tensor, group: str, rank: int, sizes: Sequence[int], batch: int, layer: str) -> Tensor:
    return x.new_empty(batch * sizes[rank], x.shape[1])


@torch.library.custom_op("fusedtp::all_reduce_rows", mutates_args=())
def all_reduce_rows(x: Tensor, group: str, layer: str) -> Tensor:
    return movers.all_reduce(communicator(group), x, layer)


@all_reduce_rows.register_fake
def _(x: Tensor, group: str, layer: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# -- autograd --------------------------------------------------------------------------------------------------------


def _save_column(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, _, biased, group, rank, sizes, batch, engine, _, keep, layer = inputs
    ctx.keep = keep
    if keep:
        ctx.mark_non_differentiable(output[-1])
    ctx.save_for_backward(output[-1] if keep else x, *weights)
    ctx.where = gradients.Where(group, rank, tuple(sizes), batch, engine, layer)
    ctx.biased = [i for i in range(len(weights)) if biased >> i & 1]


@first_order
def _column_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    dys = grads[: len(weights)]
    dx = gradients.column_dgrad(ctx.where, dys, weights) if ctx.needs_input_grad[0] else None
    dws: Any = [None] * len(weights)
    if _any(ctx.needs_input_grad[1]):
        local = [matmul(dy.t(), x) for dy in dys] if ctx.keep else None
        dws = local or gradients.column_wgrad(ctx.where, x, dys, x.dtype)
    dbs = [dys[i].sum(0) for i in ctx.biased] if _any(ctx.needs_input_grad[2]) else [None] * len(ctx.biased)
    return dx, dws, dbs, *([None] * 9)


def _save_row(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    xs, weights, _, group, rank, sizes, batch, engine, _, layer = inputs
    ctx.save_for_backward(*xs, *weights)
    ctx.where = gradients.Where(group, rank, tuple(sizes), batch, engine, layer)


@first_order
def _row_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    n = len(ctx.saved_tensors) // 2
    xs, weights = ctx.saved_tensors[:n], ctx.saved_tensors[n:]
    dxs: Any = [None] * n
    dws: Any = [None] * n
    full = None
    if _any(ctx.needs_input_grad[0]):
        dxs, full = gradients.row_dgrad(ctx.where, dy, weights, keep=_any(ctx.needs_input_grad[1]))
    if _any(ctx.needs_input_grad[1]):
        full = gradients.gather(ctx.where, dy) if full is None else full
        dws = [matmul(full.t(), x) for x in xs]
    db = dy.sum(0) if ctx.needs_input_grad[2] else None
    return dxs, dws, db, *([None] * 7)


def _save_reduced(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


@first_order
def _reduced_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    dx = matmul(dy, weight) if ctx.needs_input_grad[0] else None
    dw = matmul(dy.t(), x) if ctx.needs_input_grad[1] else None
    return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None, *([None] * 4)


def _any(flag: Any) -> bool:
    return any(flag) if isinstance(flag, (list, tuple)) else bool(flag)


def _save_where(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.where = inputs[1:]


def _gather_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return reduce_scatter_rows(dy, *ctx.where), None, None, None, None, None


def _scatter_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return all_gather_rows(dy, *ctx.where), None, None, None, None, None


def _all_reduce_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return dy, None, None


all_gather_matmul.register_autograd(_column_backward, setup_context=_save_column)
matmul_reduce_scatter.register_autograd(_row_backward, setup_context=_save_row)
matmul_all_reduce.register_autograd(_reduced_backward, setup_context=_save_reduced)
all_gather_rows.register_autograd(_gather_backward, setup_context=_save_where)
reduce_scatter_rows.register_autograd(_scatter_backward, setup_context=_save_where)
all_reduce_rows.register_autograd(_all_reduce_backward, setup_context=_save_where)

_OPS = (
    all_gather_matmul,
    matmul_reduce_scatter,
    matmul_all_reduce,
    all_gather_wgrad,
    all_gather_rows,
    reduce_scatter_rows,
    all_reduce_rows,
)
gradients.BODIES.update({op._init_fn.__name__: op._init_fn for op in _OPS})
ordered(*_OPS)
