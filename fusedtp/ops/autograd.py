"""The eager autograd of parallel linear layers: dgrad and wgrad are nodes of their own.

Note [Split backward]
A pipeline that defers weight gradients runs backward twice: once for the inputs, later for the weights. One node with
both gradients would run, and communicate, in both passes. So a layer is three nodes:

    x ------> _Input  ---- y ----+
                                 +--> _Join --> y
    w, b ---> _Weight -- token --+

_Join hands dy to both. _Input.backward computes dx; _Weight.backward computes dw and db. A token has y's shape and no
memory (one element, expanded); it exists so that dy reaches _Weight. The weight node of a row-parallel layer is
made first, so that autograd runs it after the input node (later nodes first) and finds the gathered dy there.

`sinks` are the weights' main_grads, None for a weight that has none (Note [main_grad] in main_grad.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from . import gradients
from .first_order import first_order
from .gradients import Where
from .local import linear
from .main_grad import Sink, deliver
from .matmul import is_16_bit, matmul, matmul_as


class _Join(Function):
    """(y_1..y_n, token_1..token_n) -> y_1..y_n; every dy goes to both."""

    @staticmethod
    def forward(ctx: Any, *ys_and_tokens: Tensor) -> Any:
        ys = ys_and_tokens[: len(ys_and_tokens) // 2]
        ctx.mark_dirty(*ys)
        return ys if len(ys) > 1 else ys[0]

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor, ...]:
        return (*dys, *dys)


def _token(like: Tensor, rows: int, width: int) -> Tensor:
    return like.new_empty(1).expand(rows, width)


def _wgrad_dtype(x: Tensor, sinks: Sequence[Sink | None]) -> torch.dtype:
    """fp32 where a sink takes what 16 bits would round."""
    narrow = is_16_bit(x.dtype) and any(sink is not None for sink in sinks)
    return torch.float32 if narrow else x.dtype


def forward_columns(
    at: Where,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    needs_grad: int,
    keep: bool,
) -> list[Tensor]:
    """The custom op, which takes no None among its biases; the gathered x comes last if `keep`."""
    given = [(i, b) for i, b in enumerate(biases) if b is not None]
    return gradients.op("all_gather_matmul")(
        x,
        list(weights),
        [b for _, b in given],
        sum(1 << i for i, _ in given),
        at.group,
        at.rank,
        at.sizes,
        at.batch,
        at.engine,
        needs_grad,
        keep,
        at.layer,
    )


class _ColumnInput(Function):
    @staticmethod
    def forward(
        ctx: Any, at: Where, needs_grad: int, keep: bool, x: Tensor, n: int, *weights_and_biases: Any
    ) -> Any:
        weights, biases = weights_and_biases[:n], weights_and_biases[n:]
        ctx.save_for_backward(*weights)
        ctx.at = at
        outs = forward_columns(at, x, weights, biases, needs_grad, keep)
        if keep:
            ctx.mark_non_differentiable(outs[-1])
        return tuple(outs)

    @staticmethod
    @first_order
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        weights = ctx.saved_tensors
        dx = gradients.column_dgrad(ctx.at, dys[: len(weights)], weights)
        return (None, None, None, dx, None, *([None] * (2 * len(weights))))


class _ColumnWeight(Function):
    @staticmethod
    def forward(
        ctx: Any,
        at: Where,
        x: Tensor,
        gathered: Tensor | None,
        sinks: Sequence[Sink | None],
        *weights_and_biases: Any,
    ) -> Any:
        n = len(sinks)
        weights = weights_and_biases[:n]
        ctx.save_for_backward(x, gathered)
        ctx.at, ctx.n, ctx.sinks = at, n, sinks
        rows = at.batch * sum(at.sizes)
        return tuple(_token(x, rows, w.shape[0]) for w in weights)

    @staticmethod
    @first_order
    def backward(ctx: Any, *dys: Tensor) -> tuple[Any, ...]:
        x, gathered = ctx.saved_tensors
        needs = ctx.needs_input_grad[4:]
        dws: list[Tensor | None] = [None] * ctx.n
        if any(needs[: ctx.n]):
            dtype = _wgrad_dtype(x, ctx.sinks)
            if gathered is None:
                grads = gradients.column_wgrad(ctx.at, x, dys, dtype)
            else:
                grads = [matmul_as(dy.t(), gathered, dtype) for dy in dys]
            wanted = zip(grads, ctx.sinks, needs[: ctx.n], strict=True)
            dws = [deliver(dw, sink, x.dtype) if need else None for dw, sink, need in wanted]
        dbs = [dy.sum(0) if need else None for dy, need in zip(dys, needs[ctx.n :], strict=True)]
        return (None, None, None, None, *dws, *dbs)


def column_linear(
    at: Where,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    needs_grad: int,
    sinks: Sequence[Sink | None],
    keep_gathered: bool = False,
) -> list[Tensor]:
    """x [T_r, K], w_i [N_i, K], b_i [N_i] -> y_i [T, N_i]; saves the shard of x, or the gathered x if asked to."""
    n = len(weights)
    plain = [w.detach() for w in weights], [b.detach() if b is not None else None for b in biases]
    outs = _ColumnInput.apply(at, needs_grad, keep_gathered, x, n, *plain[0], *plain[1])
    ys, gathered = outs[:n], outs[n] if keep_gathered else None
    if not any(t is not None and t.requires_grad for t in (*weights, *biases)):
        return list(ys)
    tokens = _ColumnWeight.apply(at, x.detach(), gathered, sinks, *weights, *biases)
    joined = _Join.apply(*ys, *tokens)
    return [joined] if n == 1 else list(joined)


class _RowInput(Function):
    @staticmethod
    def forward(
        ctx: Any, at: Where, needs_grad: int, cell: dict[str, Any], x: Tensor, w: Tensor, b: Any
    ) -> Tensor:
        ctx.save_for_backward(w)
        ctx.at, ctx.cell, ctx.keep = at, cell, bool(needs_grad & 2)
        return gradients.op("matmul_reduce_scatter")(
            [x], [w], b, at.group, at.rank, at.sizes, at.batch, at.engine, needs_grad, at.layer
        )

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (dx,), full = gradients.row_dgrad(ctx.at, dy, ctx.saved_tensors, ctx.keep)
        if full is not None:
            ctx.cell["dy"] = dy, dy._version, full
        return None, None, None, dx, None, None


class _RowWeight(Function):
    @staticmethod
    def forward(
        ctx: Any,
        at: Where,
        cell: dict[str, Any],
        sink: Sink | None,
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.at, ctx.cell, ctx.sink = at, cell, sink
        return _token(x, at.batch * at.sizes[at.rank], w.shape[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        dw = None
        if ctx.needs_input_grad[4]:
            kept = ctx.cell.pop("dy", None)
            fits = (
                kept is not None and kept[0] is dy and kept[1] == dy._version
            )  # else of another backward pass
            full = kept[2] if kept is not None and fits else gradients.gather(ctx.at, dy)
            dw = _dw(full, x, ctx.sink)
        return None, None, None, None, dw, dy.sum(0) if ctx.needs_input_grad[5] else None


def _dw(dy: Tensor, x: Tensor, sink: Sink | None) -> Tensor | None:
    """dy [T, N], x [T, K] -> dw [N, K], or None where the sink took it."""
    return deliver(matmul_as(dy.t(), x, _wgrad_dtype(x, [sink])), sink, x.dtype)


def row_linear(
    at: Where, x: Tensor, weight: Tensor, bias: Tensor | None, needs_grad: int, sink: Sink | None
) -> Tensor:
    """x [T, K], w [N, K], b [N] -> y [T_r, N]; saves x."""
    cell: dict[str, Any] = {}
    token = None
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        token = _RowWeight.apply(at, cell, sink, x.detach(), weight, bias)
    plain_bias = bias.detach() if bias is not None else None
    y = _RowInput.apply(at, needs_grad, cell, x, weight.detach(), plain_bias)
    return y if token is None else _Join.apply(y, token)


class _ReducedInput(Function):
    @staticmethod
    def forward(ctx: Any, at: Where, needs_grad: int, x: Tensor, w: Tensor, b: Any) -> Tensor:
        ctx.save_for_backward(w)
        return gradients.op("matmul_all_reduce")(x, w, b, at.group, at.engine, needs_grad, at.layer)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (w,) = ctx.saved_tensors
        return None, None, matmul(dy, w), None, None


class _LocalWeight(Function):
    """Where every rank has dy: of all tokens, or of its own for a weight that it reads for itself."""

    @staticmethod
    def forward(ctx: Any, sink: Sink | None, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.sink = sink
        return _token(x, x.shape[0], w.shape[0])

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        dw = _dw(dy, x, ctx.sink) if ctx.needs_input_grad[2] else None
        return None, None, dw, dy.sum(0) if ctx.needs_input_grad[3] else None


def reduced_linear(
    at: Where, x: Tensor, weight: Tensor, bias: Tensor | None, needs_grad: int, sink: Sink | None
) -> Tensor:
    """x [T, K], w [N, K], b [N] -> y [T, N] on every rank; dy is the same on all ranks, so both gradients are local."""
    plain_bias = bias.detach() if bias is not None else None
    y = _ReducedInput.apply(at, needs_grad, x, weight.detach(), plain_bias)
    if not (weight.requires_grad or (bias is not None and bias.requires_grad)):
        return y
    return _Join.apply(y, _LocalWeight.apply(sink, x.detach(), weight, bias))


class _LocalInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(w)
        return linear(x, w, b)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (w,) = ctx.saved_tensors
        return matmul(dy, w), None, None


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink) -> Tensor:
    """x [T, K], w [N, K], b [N] -> y [T, N] without communication, but for the sink of a weight that ranks share."""
    y = _LocalInput.apply(x, weight.detach(), None if bias is None else bias.detach())
    return _Join.apply(y, _LocalWeight.apply(sink, x.detach(), weight, bias))
