"""A dispatch with the matmul that its rows go into as a torch custom op, with its fake and autograd; engines "triton"
and "chunked".

    fusedtp::moe_dispatch_matmul   x [T_r, K], weights [T_r, k], matrices [E_r, N, K], offsets [E_r + 1]
                                   -> rows [max_rows, K], their weights [max_rows], y [max_rows, N], and both products
                                   [max_rows, N] if `keep`

    fusedtp::moe_dispatch_matmul_backward   dy_i [max_rows, N], matrices -> dx [T_r, K]

matrices are one, or gate and up with the activation `act`. Backward: the products' matmuls with the combine of their
sum, in one call where there is one for it. As in grouped_library.py, torch.compile and opcheck see the
autograd registered here; eager code goes through the nodes of dispatch_matmul.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..first_order import first_order
from . import exchange, grouped_engines, nodes
from .declare import PLAN, PLAN_LENGTH, custom_op, taken
from .grouped_library import any_of, grouped_gated_backward, grouped_wgrad
from .nodes import autocast_disabled, ordered, record_function


@custom_op(
    "moe_dispatch_matmul",
    f"Tensor x, Tensor weights, Tensor[] matrices, Tensor offsets, str act, bool keep, {PLAN}",
    "Tensor[]",
)
def moe_dispatch_matmul(
    x: Tensor,
    weights: Tensor,
    matrices: Sequence[Tensor],
    offsets: Tensor,
    act: str,
    keep: bool,
    *of_all: Any,
) -> list[Tensor]:
    plan, at = taken(*of_all)
    with record_function(f"fusedtp.moe_dispatch_matmul.{at.engine}"), autocast_disabled(x):
        return exchange.scatter_matmul(x, weights, matrices, offsets, act, keep, plan, at)


@moe_dispatch_matmul.register_fake
def _(
    x: Tensor,
    weights: Tensor,
    matrices: Sequence[Tensor],
    offsets: Tensor,
    act: str,
    keep: bool,
    *of_all: Any,
) -> list[Tensor]:
    _plan, at = taken(*of_all)
    products = [x.new_empty(at.max_rows, matrices[0].shape[1]) for _ in range(3 if keep else 1)]
    return [x.new_empty(at.max_rows, x.shape[1]), weights.new_empty(at.max_rows), *products]


@custom_op(
    "moe_dispatch_matmul_backward", f"Tensor[] dys, Tensor[] matrices, Tensor offsets, {PLAN}", "Tensor"
)
def moe_dispatch_matmul_backward(
    dys: Sequence[Tensor], matrices: Sequence[Tensor], offsets: Tensor, *of_all: Any
) -> Tensor:
    plan, at = taken(*of_all)
    turned = [w.mT for w in matrices]
    with record_function(f"fusedtp.moe_dispatch_matmul_backward.{at.engine}"), autocast_disabled(dys[0]):
        if exchange.multiplies_and_gathers(at, dys[0].dtype):
            return exchange.multiply_and_gather(dys, turned, offsets, None, plan, at)
        return exchange.gather(grouped_engines.matmul(at.engine, dys, turned, offsets, None), None, plan, at)


@moe_dispatch_matmul_backward.register_fake
def _(dys: Sequence[Tensor], matrices: Sequence[Tensor], offsets: Tensor, *of_all: Any) -> Tensor:
    _plan, at = taken(*of_all)
    return dys[0].new_empty(at.tokens, matrices[0].shape[2])


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _x, _weights, matrices, offsets, ctx.act, ctx.keep, *plan = inputs[:9]
    rows, row_weights, _y, *products = output
    ctx.save_for_backward(rows, offsets, *plan, *matrices, *products)
    ctx.at = inputs[9:]
    ctx.mark_non_differentiable(rows, row_weights, *products)


@first_order
def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    rows, offsets, table, orders, words, *saved = ctx.saved_tensors
    if ctx.act and not ctx.keep:
        raise RuntimeError("fusedtp::moe_dispatch_matmul has no gradients of a gated matmul without `keep`")
    dys, matrices = [grads[2]], saved[:1]
    if ctx.act:
        matrices = saved[:2]
        dys = grouped_gated_backward(grads[2], *saved[2:], offsets, ctx.act, ctx.at[1])
    engine, dx = ctx.at[1], None
    dws: list[Any] = [None] * len(dys)
    if any_of(ctx.needs_input_grad[2]):
        dws = grouped_wgrad(dys, rows, offsets, engine, rows.dtype)
    if ctx.needs_input_grad[0]:
        plan = table, orders, words
        dx = torch.ops.fusedtp.moe_dispatch_matmul_backward(dys, matrices, offsets, *plan, *ctx.at)
    return dx, None, dws, None, None, None, *([None] * PLAN_LENGTH)


moe_dispatch_matmul.register_autograd(_backward, setup_context=_save)
nodes.BODIES["moe_dispatch_matmul_backward"] = moe_dispatch_matmul_backward._init_fn
ordered(moe_dispatch_matmul, moe_dispatch_matmul_backward)
