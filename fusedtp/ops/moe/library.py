"""The movements of a mixture of experts as torch custom ops, with fakes and autograd.

    fusedtp::moe_plan      expert_ids [T_r, k] -> table [W, E], orders [T * k], words; see plan.py
    fusedtp::moe_dispatch  x [T_r, K], weights [T_r, k] -> rows [max_rows, K], their weights [max_rows]
    fusedtp::moe_combine   y [max_rows, N], weights [T_r, k] -> [T_r, N], a token's choices summed in their order

With a wire (wire.py) a dispatch's rows travel in another form and arrive as x's dtype; what follows does not.

Backward of dispatch: a combine of the rows' gradients, without weights. Backward of combine: a dispatch of the output's
gradient, times the weights for dy; the weights' gradients are inner products made where the rows are, and pulled back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..first_order import first_order
from . import exchange, weigh, wire
from .declare import AT, PLAN, PLAN_LENGTH, custom_op, taken
from .layout import layout_size
from .nodes import ordered, record_function
from .plan import Exchange


@custom_op("moe_plan", f"Tensor expert_ids, {AT}", "(Tensor, Tensor, Tensor)")
def moe_plan(expert_ids: Tensor, *at: Any) -> tuple[Tensor, Tensor, Tensor]:
    table, orders, words = exchange.make_plan(expert_ids, Exchange.of(*at))
    return table, orders, words


@moe_plan.register_fake
def _(expert_ids: Tensor, *numbers: Any) -> tuple[Tensor, Tensor, Tensor]:
    at = Exchange.of(*numbers)
    words = layout_size(at) if at.engine == "triton" else 0
    shapes = ((at.world_size, at.num_experts), (sum(at.sizes) * at.top_k,), (words,))
    table, orders, packed = (expert_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return table, orders, packed


@custom_op("moe_dispatch", f"Tensor x, Tensor? weights, {PLAN}", "(Tensor, Tensor)")
def moe_dispatch(x: Tensor, weights: Tensor | None, *of_all: Any) -> tuple[Tensor, Tensor]:
    plan, at = taken(*of_all)
    with record_function(f"fusedtp.moe_dispatch.{at.engine}"):
        travels = wire.pack(x) if at.wire else x
        rows, of_rows = exchange.scatter(travels, weights, plan, at)
        rows = wire.unpack(rows, x.shape[1], x.dtype) if at.wire else rows
        return rows, x.new_empty(0) if weights is None else of_rows


@moe_dispatch.register_fake
def _(x: Tensor, weights: Tensor | None, *of_all: Any) -> tuple[Tensor, Tensor]:
    _plan, at = taken(*of_all)
    of_rows = x.new_empty(0) if weights is None else weights.new_empty(at.max_rows)
    return x.new_empty(at.max_rows, x.shape[1]), of_rows


@custom_op("moe_combine", f"Tensor y, Tensor? weights, Tensor? row_weights, {PLAN}", "Tensor")
def moe_combine(y: Tensor, weights: Tensor | None, row_weights: Tensor | None, *of_all: Any) -> Tensor:
    plan, at = taken(*of_all)
    with record_function(f"fusedtp.moe_combine.{at.engine}"):
        return exchange.gather(y, weights, plan, at)


@moe_combine.register_fake
def _(y: Tensor, weights: Tensor | None, row_weights: Tensor | None, *of_all: Any) -> Tensor:
    _plan, at = taken(*of_all)
    return y.new_empty(at.tokens, y.shape[1])


@custom_op(
    "moe_combine_backward",
    f"Tensor dout, Tensor y, Tensor? row_weights, bool needs_weights, {PLAN}",
    "(Tensor, Tensor)",
)
def moe_combine_backward(
    dout: Tensor, y: Tensor, row_weights: Tensor | None, needs_weights: bool, *of_all: Any
) -> tuple[Tensor, Tensor]:
    plan, at = taken(*of_all)
    with record_function(f"fusedtp.moe_combine_backward.{at.engine}"):
        dots = torch.empty(
            at.max_rows if needs_weights else 0, dtype=weigh.accumulator(y.dtype), device=y.device
        )

        def weigh_rows(dy: Tensor, some: slice) -> None:
            weights = None if row_weights is None else row_weights[some]
            weigh.weigh_rows(dy[some], weights, y[some], dots[some] if needs_weights else None)

        dy, _ = exchange.scatter(dout, None, plan, at, weigh_rows)
        dw = exchange.gather_slots(dots, plan, at) if needs_weights else dout.new_empty(0)
        return dy, dw


@moe_combine_backward.register_fake
def _(
    dout: Tensor, y: Tensor, row_weights: Tensor | None, needs_weights: bool, *of_all: Any
) -> tuple[Tensor, Tensor]:
    _plan, at = taken(*of_all)
    dw = dout.new_empty(0)
    if needs_weights:
        dw = dout.new_empty(at.tokens, at.top_k, dtype=weigh.accumulator(y.dtype))
    return dout.new_empty(at.max_rows, dout.shape[1]), dw


# -- autograd --------------------------------------------------------------------------------------------------------


def _save_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[2:5])
    ctx.at = inputs[5:]
    ctx.mark_non_differentiable(output[1])


@first_order
def _dispatch_backward(ctx: Any, drows: Tensor, _: Any) -> tuple[Any, ...]:
    dx = torch.ops.fusedtp.moe_combine(drows, None, None, *ctx.saved_tensors, *ctx.at)
    return dx, None, *([None] * PLAN_LENGTH)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, weights, *others = inputs[:6]
    ctx.save_for_backward(None if weights is None else y, weights, *others)  # dy alone needs no y
    ctx.at = inputs[6:]


@first_order
def _combine_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    y, weights, row_weights, *plan = ctx.saved_tensors
    needs_weights = weights is not None and ctx.needs_input_grad[1]
    dout = dout.contiguous()
    dy, dweights = torch.ops.fusedtp.moe_combine_backward(
        dout, dout if y is None else y, row_weights, needs_weights, *plan, *ctx.at
    )
    dweights = dweights.to(weights.dtype) if needs_weights else None
    return dy, dweights, None, *([None] * PLAN_LENGTH)


moe_dispatch.register_autograd(_dispatch_backward, setup_context=_save_dispatch)
moe_combine.register_autograd(_combine_backward, setup_context=_save_combine)
ordered(moe_plan, moe_dispatch, moe_combine, moe_combine_backward)
