"""The last matmul of a mixture of experts and its combine as one call; public function and its eager autograd.

    forward    out = moe_combine(grouped_matmul(h, experts, offsets), handle), by kernels/moe_matmul_combine.py
    dgrad      dh[row] = weight * (dout[token of row] @ experts[e]), by kernels/moe_dispatch_matmul.py: dout travels
               and is multiplied in one launch; dweights from that and h
    wgrad      dexperts[e] = dy[rows of e].T @ h[rows of e], dy[row] = weight * dout[token of row]

Where no kernel does both, the graph is that of the two operations. See Note [Split backward] in ../autograd.py of how
wgrad gets dy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm import place

from .. import gradients
from ..api import _autocast, _mask, in_step
from ..first_order import first_order
from ..main_grad import main_grads_of
from . import matmul_combine_library as _library
from .api import MoEHandle, moe_combine
from .exchange import multiplies_and_gathers
from .grouped import _check, _Weights, grouped_matmul

assert _library


def moe_matmul_combine(h: Tensor, experts: Tensor, handle: MoEHandle, *, engine: str = "auto") -> Tensor:
    """moe_combine(grouped_matmul(h, experts, handle.offsets), handle); where kernels run, in one of them.

        h        [max_rows, K]  in the order of the dispatched rows; rows past handle.offsets[-1] are never read
        experts  [E / W, N, K]  of this rank
        handle                  of the dispatch; where its engine is "triton" rows travel as they are computed
        engine                  of matmuls by themselves, see grouped_matmul; "chunked" leaves the two operations apart
        return   [T_r, N]       the same bits as of the two operations by engine "triton"

    Gradients of h and of the weights differ from those of the two operations by a rounding: a choice's weight is
    applied after the matmul of dgrad, not before.

    Raises ValueError as grouped_matmul and moe_combine do.
    """
    at, offsets, weights = handle.at, handle.offsets, handle.weights
    if not _fuses(h, handle, engine):
        return moe_combine(grouped_matmul(h, experts, offsets, engine=engine), handle)
    sinks = main_grads_of([experts])
    h, experts = (_autocast(h.device.type, t) for t in (h, experts))
    with in_step(place(at.group)):
        _check(h, offsets, weights=experts)
        if h.shape[0] != at.max_rows:
            raise ValueError(
                f"rank {at.rank}: h has shape {tuple(h.shape)}, wanted [{at.max_rows}, K] as it was dispatched"
            )
        given = (offsets, engine, weights, handle.row_weights, *handle.plan, *at.flat)
        if torch.compiler.is_compiling() or not _mask(h, experts, weights):
            out: Tensor = gradients.op("moe_matmul_combine")(h, experts, *given)
            return out
        with torch.no_grad():
            made = gradients.op("moe_matmul_combine")(h, experts, *given)
    token = None
    if experts.requires_grad:
        token = _Weights.apply(engine, sinks[0], h.detach(), offsets, experts, None)
    out = _Home.apply(
        h, token, weights, experts.detach(), offsets, handle.row_weights, *handle.plan, at.flat, [made]
    )
    return out


def _fuses(h: Tensor, handle: MoEHandle, engine: str) -> bool:
    """Whether one kernel does both: by what all ranks share."""
    return engine in ("auto", "triton") and multiplies_and_gathers(handle.at, h.dtype)


class _Home(Function):
    """A matmul and combine that was already done. The token's gradient is dy, for the node that makes dexperts."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, token: Tensor | None, weights: Tensor, experts: Tensor, offsets: Tensor,
        row_weights: Tensor, table: Tensor, orders: Tensor, words: Tensor, at: Sequence[Any], cell: list[Tensor],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(h, experts, offsets, row_weights, table, orders, words)
        ctx.at, ctx.wide = at, weights.dtype
        return cell.pop()

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        h, experts, offsets, row_weights, *plan = ctx.saved_tensors
        _, needs_rows, needs_weights, *_ = ctx.needs_input_grad
        dh, dy, dweights = gradients.op("moe_matmul_combine_backward")(
            dout.contiguous(), h, experts, offsets, row_weights, needs_rows, needs_weights, *plan, *ctx.at
        )
        dweights = dweights.to(ctx.wide) if needs_weights else None
        return dh, dy if needs_rows else None, dweights, *([None] * 8)
