"""A dispatch with the matmul that its rows go into as a torch custom op, with its fake and autograd; engine "triton".

    fusedtp::moe_dispatch_matmul   x [T_r, K], weights [T_r, k], matrices [E_r, N, K], offsets [E_r + 1]
                                   -> rows [max_rows, K], their weights [max_rows], y [max_rows, N], and both products
                                   [max_rows, N] if `keep`

matrices are one, or gate and up with the activation `act`. Backward: what the two operations by themselves do, the
grouped matmuls and then a combine of the rows' gradients. As in grouped_library.py, torch.compile and opcheck see the
autograd registered here; eager code goes through the nodes of dispatch_matmul.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..first_order import first_order
from ..library import as_given
from ..ordered import ordered
from ..profile import record_function
from . import exchange
from .declare import PLAN, PLAN_LENGTH, custom_op, taken
from .grouped_library import any_of, grouped_gated_backward, grouped_matmul, grouped_wgrad


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
    with record_function(f"fusedtp.moe_dispatch_matmul.{at.engine}"), as_given(x):
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
    dws: Any = [None] * len(dys)
    if any_of(ctx.needs_input_grad[2]):
        dws = [grouped_wgrad(dy, rows, offsets, engine, rows.dtype) for dy in dys]
    if ctx.needs_input_grad[0]:
        drows = grouped_matmul(dys, [w.mT for w in matrices], offsets, None, engine)
        dx = torch.ops.fusedtp.moe_combine(drows, None, None, table, orders, words, *ctx.at)
    return dx, None, dws, None, None, None, *([None] * PLAN_LENGTH)


moe_dispatch_matmul.register_autograd(_backward, setup_context=_save)
ordered(moe_dispatch_matmul)
