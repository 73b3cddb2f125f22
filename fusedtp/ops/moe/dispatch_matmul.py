"""A dispatch and the matmul that its rows go into, in one call: by one kernel where the engine is `triton`.

By `chunked` rows are multiplied when all have come, but their gradients expert by expert, each product straight into
the memory of its tokens' ranks; by the other engines it is the two calls, one after another. The result has the same
bits either way, see kernels/moe_dispatch_matmul.py; so have gradients, which the same operations make.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm import Group, Place, place, propagate_errors

from ..first_order import first_order
from ..main_grad import main_grads_of
from ..operation import needs_grad
from ..pointwise import ACTIVATIONS
from . import matmul_library as _library  # registers the custom op
from . import nodes, weigh
from .api import ALONE, MoEHandle, _known_room, host_knows, moe_dispatch, planned, without_dropped
from .exchange import engine_of
from .grouped import _check, activated, grouped_gated, grouped_matmul, with_wgrad
from .plan import Exchange, Plan, offsets_of

assert _library


def moe_dispatch_matmul(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    matrices: Tensor,
    num_experts: int,
    group: Group | None,
    *,
    max_rows: int | None = None,
    sizes: Sequence[int] | None = None,
    engine: str = "auto",
    layer: str = "",
    weights_sum: float | None = None,
    wire: str = "",
) -> tuple[Tensor, Tensor, MoEHandle]:
    """moe_dispatch, then grouped_matmul of its rows.

        x, expert_ids, weights, num_experts, group, max_rows, sizes,
        weights_sum, wire   as in moe_dispatch; in another form rows travel by themselves
        matrices   [E / W, N, K]  of this rank's experts, of x's dtype
        return     y [max_rows, N], offsets, handle; rows of y past offsets[-1] are undefined

    dgrad  dx = combine of grouped_matmul(dy, matrices.mT), without weights; in one call, see matmul_combine.py
    wgrad  of the rows that were dispatched, which are kept
    Raises ValueError as the two functions do.
    """
    at = ALONE if group is None else place(group)
    given = x, expert_ids, weights, num_experts
    how: dict[str, Any] = dict(
        max_rows=max_rows, sizes=sizes, engine=engine, layer=layer, weights_sum=weights_sum, wire=wire
    )
    with propagate_errors(at):
        fuses = not wire and _fuses(at, engine, x, matrices)
    if not fuses:
        rows, offsets, handle = moe_dispatch(*given, group, **how)
        return grouped_matmul(rows, matrices, offsets), offsets, handle
    return _fused(given, [matrices], "", at, how)


def moe_dispatch_gated(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    gate: Tensor,
    up: Tensor,
    num_experts: int,
    group: Group | None,
    *,
    act: str = "silu",
    max_rows: int | None = None,
    sizes: Sequence[int] | None = None,
    engine: str = "auto",
    layer: str = "",
    weights_sum: float | None = None,
    wire: str = "",
) -> tuple[Tensor, Tensor, MoEHandle]:
    """moe_dispatch, then grouped_gated of its rows: as moe_dispatch_matmul, by gate and up [E / W, N, K] with `act`."""
    at = ALONE if group is None else place(group)
    given = x, expert_ids, weights, num_experts
    how: dict[str, Any] = dict(
        max_rows=max_rows, sizes=sizes, engine=engine, layer=layer, weights_sum=weights_sum, wire=wire
    )
    with propagate_errors(at):
        if act not in ACTIVATIONS:
            raise ValueError(f"got act {act!r}: there are {', '.join(ACTIVATIONS)}")
        fuses = not wire and _fuses(at, engine, x, gate, up)
    if not fuses:
        rows, offsets, handle = moe_dispatch(*given, group, **how)
        return grouped_gated(rows, gate, up, offsets, act=act), offsets, handle
    return _fused(given, [gate, up], act, at, how)


def _fuses(at: Place, engine: str, x: Tensor, *matrices: Tensor) -> bool:
    """Whether one call does both. Not under autocast, which casts what the matmul takes and not what travels, nor
    where the matmul has something to say against its operands."""
    chosen = engine_of(at.name or None, engine, x.dtype)
    if torch.is_autocast_enabled(x.device.type) or chosen not in ("chunked", "triton"):
        return False
    first = matrices[0]
    return all(w.dtype == x.dtype and w.device == x.device and w.shape == first.shape for w in matrices)


def _fused(
    given: tuple[Tensor, Tensor, Tensor, int],
    matrices: list[Tensor],
    act: str,
    at: Place,
    how: dict[str, Any],
) -> tuple[Tensor, Tensor, MoEHandle]:
    x, expert_ids, weights, num_experts = given
    sinks = main_grads_of(matrices)
    with propagate_errors(at):
        plan, where = planned(x, expert_ids, weights, num_experts, at, **how)
        if host_knows(plan, where):
            where = _known_room(plan, where)
        offsets = offsets_of(plan.table, where)
        _check(x, offsets, **dict(zip(("gate", "up") if act else ("matrices",), matrices, strict=True)))
        weights = without_dropped(weights, expert_ids).to(weigh.accumulator(x.dtype))
        wanted = needs_grad(x, *matrices) != 0
        inputs = (x, weights.detach(), matrices)
        if not torch.compiler.is_compiling():
            inputs = (x.detach(), weights.detach(), [w.detach() for w in matrices])
        keep = wanted and act != ""
        rows, row_weights, *products = torch.ops.fusedtp.moe_dispatch_matmul(
            *inputs, offsets, act, keep, *plan, *where.flat
        )
        handle = MoEHandle(weights, row_weights, plan, where, offsets)
        if torch.compiler.is_compiling() or not wanted:
            return products[0], offsets, handle
    made = dict(zip("ygu", products, strict=False))
    cell = [made.pop(name) for name in ("gu" if act else "y")]
    ys = _Products.apply(x, offsets, plan, where, cell, *(w.detach() for w in matrices))
    if act:
        (g, u), (gate, up) = ys, matrices
        y = activated(g, u, where.engine, act, sinks, rows, gate, up, offsets, made)
    else:
        y = with_wgrad(ys, where.engine, sinks[0], rows, matrices[0], None, offsets)
    return y, offsets, handle


class _Products(Function):
    """What a dispatch with its matmul made already: one product, or gate's and up's."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, offsets: Tensor, plan: Plan, at: Exchange, cell: list[Tensor], *matrices: Tensor
    ) -> Any:
        ctx.save_for_backward(offsets, *plan, *matrices)
        ctx.at = at.flat
        ys = tuple(cell)
        cell.clear()
        return ys if len(ys) > 1 else ys[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        offsets, table, orders, words, *matrices = ctx.saved_tensors
        plan = table, orders, words
        dx = nodes.op("moe_dispatch_matmul_backward")(dys, matrices, offsets, *plan, *ctx.at)
        return dx, *([None] * (4 + len(matrices)))
