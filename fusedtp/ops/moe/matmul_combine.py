"""The last matmul of a mixture of experts and its combine as one call; public function and its eager autograd.

    forward    out = moe_combine(grouped_matmul(h, experts, offsets), handle), by kernels/moe_matmul_combine.py
    dgrad      dy, dweights = those of the combine;  dh = grouped_matmul(dy, experts.mT, offsets)
    wgrad      dexperts[e] = dy[rows of e].T @ h[rows of e]

The graph is that of the two operations: the matmul's nodes hand out what the kernel left of the products, `_Sums` what
it made of them. The products are kept for the gradient of the weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusedtp.comm import place
from fusedtp.comm.regions import FLAGS_PER_SOURCE

from .. import gradients
from ..api import _autocast, _mask, in_step
from ..autograd import _token
from ..first_order import first_order
from ..main_grad import main_grads_of
from . import matmul_combine_library as _library
from .api import MoEHandle, moe_combine
from .exchange import FUSED_DTYPES
from .grouped import _check, grouped_matmul, plain_nodes
from .library import combine_gradients

assert _library


def moe_matmul_combine(h: Tensor, experts: Tensor, handle: MoEHandle, *, engine: str = "auto") -> Tensor:
    """moe_combine(grouped_matmul(h, experts, handle.offsets), handle); where kernels run, in one of them.

        h        [max_rows, K]  in the order of the dispatched rows; rows past handle.offsets[-1] are never read
        experts  [E / W, N, K]  of this rank
        handle                  of the dispatch; where its engine is "triton" rows travel as they are computed
        engine                  of matmuls by themselves, see grouped_matmul: all of them in backward; "chunked" leaves
                                the two operations apart
        return   [T_r, N]       the same bits as of the two operations by engine "triton"

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
        keep = torch.is_grad_enabled() and weights.requires_grad
        given = (offsets, keep, engine, weights, handle.row_weights, *handle.plan, *at.flat)
        if torch.compiler.is_compiling() or not _mask(h, experts, weights):
            outs: list[Tensor] = gradients.op("moe_matmul_combine")(h, experts, *given)
            return outs[0]
        with torch.no_grad():
            outs = gradients.op("moe_matmul_combine")(h, experts, *given)
    products = outs[1] if keep else _token(h, at.max_rows, experts.shape[1])
    y = plain_nodes(engine, sinks[0], h, experts, None, offsets, {"y": products})
    out: Tensor = _Sums.apply(y, weights, handle.row_weights, *handle.plan, at.flat, {"out": outs[0]})
    return out


def _fuses(h: Tensor, handle: MoEHandle, engine: str) -> bool:
    """Whether one kernel does both: by what all ranks share."""
    kernels = handle.at.engine == "triton" and engine in ("auto", "triton")
    return kernels and h.dtype in FUSED_DTYPES and handle.at.experts_here < FLAGS_PER_SOURCE - 1


class _Sums(Function):
    """As a combine that was already done."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weights: Tensor, row_weights: Tensor, table: Tensor, orders: Tensor, words: Tensor,
        at: Sequence[Any], cell: dict[str, Tensor],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(y, weights, row_weights, table, orders, words)
        ctx.at = at
        return cell.pop("out")

    @staticmethod
    @first_order
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad[1]
        return *combine_gradients(dout, ctx.saved_tensors, ctx.at, needs), *([None] * 6)
