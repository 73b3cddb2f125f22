"""The last matmul of a mixture of experts and its combine as one call; public function and its eager autograd.

    forward    out = moe_combine(grouped_matmul(h, experts, offsets), handle): by kernels/moe_matmul_combine.py, or on
               a CPU expert by expert, each product straight into the memory of its tokens' ranks
    dgrad      dh[row] = weight * (dout[token of row] @ experts[e]): dout travels and is multiplied in one call, on a
               GPU by kernels/moe_dispatch_matmul.py; dweights from that and h
    wgrad      dexperts[e] = dy[rows of e].T @ (weight * h)[rows of e], dy[row] = dout[token of row]

The weight is a factor of h, whose rows are shorter than those of dout, and no product of forward is kept. By other
engines the graph is that of the two operations. Nodes as in Note [Split backward] of nodes.py: wgrad is one of
its own, to which that of dgrad leaves dy and the weighted h.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm import place, propagate_errors

from ..first_order import first_order
from ..main_grad import Sink, main_grads_of
from ..operation import as_autocast, needs_grad
from . import matmul_combine_library as _library
from . import nodes
from .api import MoEHandle, moe_combine
from .exchange import multiplies_and_gathers
from .grouped import _check, grouped_matmul, wgrads
from .nodes import Join, token
from .plan import Exchange

assert _library


def moe_matmul_combine(h: Tensor, experts: Tensor, handle: MoEHandle, *, engine: str = "auto") -> Tensor:
    """moe_combine(grouped_matmul(h, experts, handle.offsets), handle) in one call; where kernels run, by one of them.

        h        [max_rows, K]  in the order of the dispatched rows; rows past handle.offsets[-1] are never read
        experts  [E / W, N, K]  of this rank
        handle                  of the dispatch; where its engine is "triton" rows travel as they are computed
        engine                  of matmuls by themselves, see grouped_matmul; where it is another than the dispatch's,
                                and in fp16, the two operations stay apart
        return   [T_r, N]       the same bits as of the two operations by that engine

    Gradients differ from those of the two operations by a rounding: a choice's weight is applied after the matmul of
    dgrad, not before, and in that of wgrad to h.

    Raises ValueError as grouped_matmul and moe_combine do.
    """
    at, offsets, weights = handle.at, handle.offsets, handle.weights
    if not _fuses(h, handle, engine):
        return moe_combine(grouped_matmul(h, experts, offsets, engine=engine), handle)
    sinks = main_grads_of([experts])
    h, experts = as_autocast(h.device.type, h, experts)
    with propagate_errors(place(at.group)):
        _check(h, offsets, weights=experts)
        if h.shape[0] != at.max_rows:
            raise ValueError(
                f"rank {at.rank}: h has shape {tuple(h.shape)}, wanted [{at.max_rows}, K] as it was dispatched"
            )
        given = (offsets, engine, weights, handle.row_weights, *handle.plan, *at.flat)
        if torch.compiler.is_compiling() or not needs_grad(h, experts, weights):
            out: Tensor = nodes.op("moe_matmul_combine")(h, experts, *given)
            return out
        with torch.no_grad():
            made = nodes.op("moe_matmul_combine")(h, experts, *given)
    cell: dict[str, Any] = {}
    token, where = None, (offsets, handle.row_weights, *handle.plan)
    if experts.requires_grad:
        token = _HomeWeights.apply(engine, sinks[0], cell, at, h.detach(), experts, *where)
    out = _Home.apply(h, weights, experts.detach(), *where, at, token is not None, cell, [made])
    return out if token is None else Join.apply(out, token)


def _fuses(h: Tensor, handle: MoEHandle, engine: str) -> bool:
    """Whether one call does both: by what all ranks share. Not in fp16, whose gradients may leave its range before
    they are weighed."""
    kind = h.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h.dtype
    alike = engine in ("auto", handle.at.engine) and dtype != torch.float16
    return alike and multiplies_and_gathers(handle.at, h.dtype)


class _Home(Function):
    """A matmul and combine that was already done; backward leaves dy and weighted h in the cell for the weight node."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weights: Tensor, experts: Tensor, offsets: Tensor, row_weights: Tensor, table: Tensor,
        orders: Tensor, words: Tensor, at: Exchange, keep: bool, cell: dict[str, Any], made: list[Tensor],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(h, experts, offsets, row_weights, table, orders, words)
        ctx.at, ctx.keep, ctx.cell, ctx.wide = at.flat, keep, cell, weights.dtype
        return made.pop()

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        h, experts, offsets, row_weights, *plan = ctx.saved_tensors
        needs_weights = ctx.needs_input_grad[1]
        dh, dy, weighed, dweights = nodes.op("moe_matmul_combine_backward")(
            dout.contiguous(), h, experts, offsets, row_weights, ctx.keep, needs_weights, *plan, *ctx.at
        )
        if ctx.keep:
            ctx.cell["operands"] = dout, dout._version, dy, weighed
        return dh, dweights.to(ctx.wide) if needs_weights else None, *([None] * 10)


class _HomeWeights(Function):
    """dexperts, of what the node of the inputs left; rows travel again where that did not run in this pass."""

    @staticmethod
    def forward(
        ctx: Any, engine: str, sink: Sink | None, cell: dict[str, Any], at: Exchange, h: Tensor, experts: Tensor,
        offsets: Tensor, row_weights: Tensor, table: Tensor, orders: Tensor, words: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(h, offsets, row_weights, table, orders, words)
        ctx.engine, ctx.sink, ctx.cell, ctx.at = engine, sink, cell, at.flat
        return token(h, at.tokens, experts.shape[1])

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        h, offsets, row_weights, *plan = ctx.saved_tensors
        kept = ctx.cell.pop("operands", None)
        if kept is not None and kept[0] is dout and kept[1] == dout._version:  # else of another backward pass
            _dout, _version, dy, weighed = kept
        else:
            dy, weighed = nodes.op("moe_matmul_combine_operands")(
                dout.contiguous(), h, row_weights, *plan, *ctx.at
            )
        [dexperts] = wgrads(ctx.engine, [dy], weighed, offsets, [ctx.sink])
        return None, None, None, None, None, dexperts, *([None] * 5)
