"""The last matmul of a mixture of experts with its combine as torch custom ops, with fakes and autograd.

    fusedtp::moe_matmul_combine            h [max_rows, K], experts [E_r, N, K], weights [T_r, k] -> out [T_r, N]
    fusedtp::moe_matmul_combine_backward   dout [T_r, N], h, experts -> dh [max_rows, K], the rows of dout
                                           [max_rows, N] and h times its weights [max_rows, K], from which dexperts
                                           follow, or [0, ...], and dweights [T_r, k]
    fusedtp::moe_matmul_combine_operands   dout, h -> those two alone

Backward is a dispatch of dout with its matmul by experts.mT, in one call too. A choice's weight is a factor of its
row, so rows travel without it: dweights are the inner products of what the matmul makes of them with h, and no product
of the forward pass is kept.

As in grouped_library.py, the autograd registered here is what torch.compile and opcheck see; eager code goes through
the nodes of matmul_combine.py. `local` is the engine of the weights' gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..first_order import first_order
from . import exchange, nodes, weigh
from .declare import PLAN, PLAN_LENGTH, custom_op, taken
from .nodes import autocast_disabled, ordered, record_function


@custom_op(
    "moe_matmul_combine",
    f"Tensor h, Tensor experts, Tensor offsets, str local, Tensor weights, Tensor row_weights, {PLAN}",
    "Tensor",
)
def moe_matmul_combine(
    h: Tensor,
    experts: Tensor,
    offsets: Tensor,
    local: str,
    weights: Tensor,
    row_weights: Tensor,
    *of_all: Any,
) -> Tensor:
    plan, at = taken(*of_all)
    with autocast_disabled(h), record_function(f"fusedtp.moe_matmul_combine.{at.engine}"):
        return exchange.multiply_and_gather([h], [experts], offsets, weights, plan, at)


@moe_matmul_combine.register_fake
def _(
    h: Tensor,
    experts: Tensor,
    offsets: Tensor,
    local: str,
    weights: Tensor,
    row_weights: Tensor,
    *of_all: Any,
) -> Tensor:
    _plan, at = taken(*of_all)
    return h.new_empty(at.tokens, experts.shape[1])


@custom_op(
    "moe_matmul_combine_backward",
    "Tensor dout, Tensor h, Tensor experts, Tensor offsets, Tensor row_weights, bool needs_rows, bool needs_weights, "
    + PLAN,
    "(Tensor, Tensor, Tensor, Tensor)",
)
def moe_matmul_combine_backward(
    dout: Tensor, h: Tensor, experts: Tensor, offsets: Tensor, row_weights: Tensor, needs_rows: bool,
    needs_weights: bool, *of_all: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    plan, at = taken(*of_all)
    with autocast_disabled(h), record_function(f"fusedtp.moe_matmul_combine_backward.{at.engine}"):
        dy, _, dh = exchange.scatter_matmul(dout, None, [experts.mT], offsets, "", False, plan, at)
        some = slice(0, exchange.known_rows(plan, at))
        dots = dh.new_empty(at.max_rows if needs_weights else 0, dtype=weigh.accumulator(h.dtype))
        weigh.weigh_rows(dh[some], row_weights[some], h[some], dots[some] if needs_weights else None)
        weighed = weigh.weighed(h, row_weights, some) if needs_rows else h.new_empty(0, h.shape[1])
        dy = dy if needs_rows else dy.new_empty(0, dy.shape[1])
        dweights = exchange.gather_slots(dots, plan, at) if needs_weights else dots
        return dh, dy, weighed, dweights


@moe_matmul_combine_backward.register_fake
def _(
    dout: Tensor, h: Tensor, experts: Tensor, offsets: Tensor, row_weights: Tensor, needs_rows: bool,
    needs_weights: bool, *of_all: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _plan, at = taken(*of_all)
    shape, rows = (at.tokens, at.top_k) if needs_weights else (0,), at.max_rows if needs_rows else 0
    dweights = dout.new_empty(shape, dtype=weigh.accumulator(h.dtype))
    operands = dout.new_empty(rows, dout.shape[1]), h.new_empty(rows, h.shape[1])
    return h.new_empty(h.shape), *operands, dweights


@custom_op(
    "moe_matmul_combine_operands", f"Tensor dout, Tensor h, Tensor row_weights, {PLAN}", "(Tensor, Tensor)"
)
def moe_matmul_combine_operands(
    dout: Tensor, h: Tensor, row_weights: Tensor, *of_all: Any
) -> tuple[Tensor, Tensor]:
    plan, at = taken(*of_all)
    with autocast_disabled(h), record_function(f"fusedtp.moe_matmul_combine_operands.{at.engine}"):
        dy, _ = exchange.scatter(dout, None, plan, at)
        return dy, weigh.weighed(h, row_weights, slice(0, exchange.known_rows(plan, at)))


@moe_matmul_combine_operands.register_fake
def _(dout: Tensor, h: Tensor, row_weights: Tensor, *of_all: Any) -> tuple[Tensor, Tensor]:
    _plan, at = taken(*of_all)
    return dout.new_empty(at.max_rows, dout.shape[1]), h.new_empty(at.max_rows, h.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, experts, offsets, ctx.local, weights, row_weights, *plan = inputs[:9]
    ctx.save_for_backward(h, experts, offsets, row_weights, *plan)
    ctx.at, ctx.wide = inputs[9:], weights.dtype


@first_order
def _backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    h, experts, offsets, row_weights, *plan = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dh, dy, weighed, dweights = torch.ops.fusedtp.moe_matmul_combine_backward(
        dout.contiguous(), h, experts, offsets, row_weights, needs[1], needs[4], *plan, *ctx.at
    )
    dexperts = None
    if needs[1]:
        [dexperts] = nodes.op("grouped_wgrad")([dy], weighed, offsets, ctx.local, h.dtype)
    return (
        dh,
        dexperts,
        None,
        None,
        dweights.to(ctx.wide) if needs[4] else None,
        None,
        *([None] * PLAN_LENGTH),
    )


moe_matmul_combine.register_autograd(_backward, setup_context=_save)
_ops = moe_matmul_combine, moe_matmul_combine_backward, moe_matmul_combine_operands
nodes.BODIES.update({each._init_fn.__name__: each._init_fn for each in _ops})
ordered(*_ops)
