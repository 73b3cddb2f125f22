"""The movements of a mixture of experts as torch custom ops, with fakes and autograd.

    fusedtp::moe_plan      expert_ids [T_r, k] -> table [W, E], orders [T * k], words; see plan.py
    fusedtp::moe_dispatch  x [T_r, K], weights [T_r, k] -> rows [max_rows, K], their weights [max_rows]
    fusedtp::moe_combine   y [max_rows, N], weights [T_r, k] -> [T_r, N], a token's choices summed in their order

With a wire (wire.py) a dispatch's rows travel in another form and arrive as x's dtype; what follows does not.

Backward of dispatch: a combine of the rows' gradients, without weights. Backward of combine: a dispatch of the output's
gradient, times the weights for dy; the weights' gradients are inner products made where the rows are, and pulled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]

from ..first_order import first_order
from ..profile import record_function
from . import exchange, weigh, wire
from .layout import layout_size
from .plan import Exchange, Plan


@torch.library.custom_op("fusedtp::moe_plan", mutates_args=())
def moe_plan(
    expert_ids: Tensor,
    group: str,
    engine: str,
    layer: str,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    at = Exchange.of(group, engine, layer, numbers)
    table, orders, words = exchange.make_plan(expert_ids, at)
    return table, orders, words


@moe_plan.register_fake
def _(
    expert_ids: Tensor,
    group: str,
    engine: str,
    layer: str,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    at = Exchange.of(group, engine, layer, numbers)
    words = layout_size(at) if engine == "triton" else 0
    shapes = ((at.world_size, at.num_experts), (sum(at.sizes) * at.top_k,), (words,))
    table, orders, packed = (expert_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)
    return table, orders, packed


@torch.library.custom_op("fusedtp::moe_dispatch", mutates_args=())
def moe_dispatch(
    x: Tensor,
    weights: Tensor | None,
    table: Tensor,
    orders: Tensor,
    words: Tensor,
    group: str,
    engine: str,
    layer: str,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor]:
    at = Exchange.of(group, engine, layer, numbers)
    with record_function(f"fusedtp.moe_dispatch.{engine}"):
        travels = wire.pack(x) if at.wire else x
        rows, of_rows = exchange.scatter(travels, weights, Plan(table, orders, words), at)
        rows = wire.unpack(rows, x.shape[1], x.dtype) if at.wire else rows
        return rows, x.new_empty(0) if weights is None else of_rows


@moe_dispatch.register_fake
def _(
    x: Tensor,
    weights: Tensor | None,
    table: Tensor,
    orders: Tensor,
    words: Tensor,
    group: str,
    engine: str,
    layer: str,
    numbers: Sequence[int],
) -> tuple[Tensor, Tensor]:
    at = Exchange.of(group, engine, layer, numbers)
    of_rows = x.new_empty(0) if weights is None else weights.new_empty(at.max_rows)
    return x.new_empty(at.max_rows, x.shape[1]), of_rows


@torch.library.custom_op("fusedtp::moe_combine", mutates_args=())
def moe_combine(
    y: Tensor,
    weights: Tensor | None,
    row_weights: Tensor | None,
    table: Tensor,
    orders: Tensor,
    words: Tensor,
    group: str,
    engine: str,
    layer: str,
    numbers: Sequence[int],
) -> Tensor:
    at = Exchange.of(group, engine, layer, numbers)
    with record_function(f"fusedtp.moe_combine.{engine}"):
        return exchange.gather(y, weights, Plan(table, orders, words), at)


@moe_combine.register_fake
def _(
    y: Tensor,
    weights: Tensor | None,
    row_weights: Tensor | None,
    table: Tensor,
    orders: Tensor,
    words: Tensor,
    group: str,
    engine: str,
    layer: str,
    numbers: Sequence[int],
) -> Tensor:
    at = Exchange.of(group, engine, layer, numbers)
    return y.new_empty(at.tokens, y.shape[1])


@torch.library.custom_op("fusedtp::moe_combine_backward", mutates_args=())
def moe_combine_backward(
    dout: Tensor,
    y: Tensor,
    row_weights: Tensor | None,
    table: Tensor,
    orders: Tensor,
    words: Tensor,
    group: str,
    engine: str,
    layer: str,
    numbers: Sequence[int],
    needs_weights: bool,
) -> tuple[Tensor, Tensor]:
    plan = Plan(table, orders, words)
    at = Exchange.of(group, engine, layer, numbers)
    with record_function(f"fusedtp.moe_combine_backward.{engine}"):
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
    dout: Tensor,
    y: Tensor,
    row_weights: Tensor | None,
    table: Tensor,
    orders: Tensor,
    words: Tensor,
    group: str,
    engine: str,
    layer: str,
    numbers: Sequence[int],
    needs_weights: bool,
) -> tuple[Tensor, Tensor]:
    at = Exchange.of(group, engine, layer, numbers)
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
    return dx, *([None] * 8)


def _save_combine(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, weights, *others = inputs[:6]
    ctx.save_for_backward(None if weights is None else y, weights, *others)  # dy alone needs no y
    ctx.at = inputs[6:]


def combine_gradients(
    dout: Tensor, saved: Sequence[Any], at: Sequence[Any], needs_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """(dy, dweights) of a combine; saved: its y (None where dweights are not wanted), weights, row_weights and plan."""
    y, weights, row_weights, *plan = saved
    dout = dout.contiguous()
    y = dout if y is None else y
    dy, dw = torch.ops.fusedtp.moe_combine_backward(dout, y, row_weights, *plan, *at, needs_weights)
    return dy, dw.to(weights.dtype) if needs_weights else None


@first_order
def _combine_backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    needs = ctx.saved_tensors[1] is not None and ctx.needs_input_grad[1]
    return *combine_gradients(dout, ctx.saved_tensors, ctx.at, needs), *([None] * 8)


moe_dispatch.register_autograd(_dispatch_backward, setup_context=_save_dispatch)
moe_combine.register_autograd(_combine_backward, setup_context=_save_combine)

if hasattr(
    CustomOpDef, "register_effect"
):  # calls of a group keep their order under a compiler, as in ../library.py
    from torch.library import EffectType  # type: ignore[attr-defined]

    for _op in (moe_plan, moe_dispatch, moe_combine, moe_combine_backward):
        _op.register_effect(EffectType.ORDERED)
