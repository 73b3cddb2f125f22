"""Matmuls of ragged groups: each row by the weights of its expert. Public functions and their eager autograd.

    rows     [R, K]     expert-major: the rows of expert e are offsets[e] .. offsets[e + 1]
    offsets  [E + 1]    int32, on the device of rows: offsets[0] is 0, offsets[E] at most R
    weights  [E, N, K]  rows, weights and bias of one dtype, of any strides
    return   [R, N]

Rows from offsets[E] on belong to nobody: room that a bounded buffer has left. What they hold, NaN too, is not used, the
same rows of the result are undefined, and so are those of the gradient of `rows`. No gradient of a weight has a part of
them. Whoever made the rows must not use those rows of the gradient either: a sum over all rows would.

dgrad and wgrad are nodes of their own, see Note [Split backward] in nodes.py. A weight with a `main_grad` gets
its gradient added there in fp32, see Note [main_grad] in ../main_grad.py; grouped_mm (`chunked` on a GPU) rounds it.

Offsets on a CPU are checked. Those on a GPU are not, which would mean to wait for it: kernels cut them to [0, R].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..first_order import first_order
from ..main_grad import Sink, deliver, main_grads_of, wgrad_dtype
from ..operation import as_autocast, needs_grad
from ..pointwise import ACTIVATIONS
from . import grouped_library as _library  # registers the custom ops
from . import nodes
from .nodes import Join, token

assert _library


def grouped_matmul(
    rows: Tensor, weights: Tensor, offsets: Tensor, *, bias: Tensor | None = None, engine: str = "auto"
) -> Tensor:
    """y[i] = rows[i] @ weights[e].T + bias[e], e the expert of row i.

        rows     [R, K]     fp32, fp16, bf16, and on CPU fp64
        weights  [E, N, K]
        offsets  [E + 1]    int32
        bias     [E, N]     or None
        engine   "auto", "triton", or "chunked": torch's grouped_mm on a GPU, one matmul an expert on a CPU
        return   [R, N]     summed in fp32 (fp64), rounded once; undefined from row offsets[E] on

    dgrad  drows = grouped_matmul(dy, weights.mT, offsets)
    wgrad  dweights[e] = dy[rows of e].T @ rows[rows of e], dbias[e] = sum of dy[rows of e]; zeros for no rows

    Raises ValueError for shapes, dtypes, devices or an engine that do not fit; on CPU for offsets that do not.
    Source: Gale et al. 2022, "MegaBlocks", section 4.
    """
    sinks = main_grads_of([weights])
    rows, weights = as_autocast(rows.device.type, rows, weights)
    (bias,) = as_autocast(rows.device.type, bias)
    _check(rows, offsets, weights=weights)
    if bias is not None and bias.shape != weights.shape[:2]:
        raise ValueError(f"got a bias {tuple(bias.shape)} for weights {tuple(weights.shape)}, wanted [E, N]")
    _check_alike(rows, bias=bias)
    if torch.compiler.is_compiling() or not needs_grad(rows, weights, bias):
        y: Tensor = nodes.op("grouped_matmul")([rows], [weights], offsets, bias, engine)
        return y
    fixed = None if bias is None else bias.detach()
    y = _Rows.apply(engine, rows, weights.detach(), fixed, offsets)
    return with_wgrad(y, engine, sinks[0], rows, weights, bias, offsets)


def with_wgrad(
    y: Tensor,
    engine: str,
    sink: Sink | None,
    rows: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
) -> Tensor:
    """y, from whose gradient those of weights and bias follow too."""
    if weights.requires_grad or (bias is not None and bias.requires_grad):
        y = Join.apply(y, _Weights.apply(engine, sink, rows.detach(), offsets, weights, bias))
    return y


def grouped_gated(
    rows: Tensor, gate: Tensor, up: Tensor, offsets: Tensor, *, act: str = "silu", engine: str = "auto"
) -> Tensor:
    """y[i] = act(rows[i] @ gate[e].T) * (rows[i] @ up[e].T), e the expert of row i: the first half of a gated MLP.

        rows     [R, K]     fp32, fp16, bf16, and on CPU fp64
        gate, up [E, N, K]  two tensors, or the halves of one
        offsets  [E + 1]    int32
        act      "silu" (SwiGLU), "gelu" or "gelu_pytorch_tanh" (GeGLU), as transformers calls them
        engine   as in grouped_matmul
        return   [R, N]     undefined from row offsets[E] on

    `triton` joins both sums before they are rounded; `chunked` rounds them first. Where a gradient is wanted both are
    kept, [R, N] each.
    dgrad  drows = dg @ gate[e] + du @ up[e], summed in fp32, with dg and du of the two products
    wgrad  dgate[e] = dg[rows of e].T @ rows[rows of e], dup likewise; zeros for no rows

    Raises ValueError as grouped_matmul does. Source: Shazeer 2020, "GLU variants".
    """
    if act not in ACTIVATIONS:
        raise ValueError(f"got act {act!r}: there are {', '.join(ACTIVATIONS)}")
    sinks = main_grads_of([gate, up])
    rows, gate, up = as_autocast(rows.device.type, rows, gate, up)
    _check(rows, offsets, gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(f"got gate {tuple(gate.shape)} and up {tuple(up.shape)}")
    wanted = needs_grad(rows, gate, up)
    if torch.compiler.is_compiling() or not wanted:
        keep = wanted != 0
        outs: list[Tensor] = nodes.op("grouped_gated")(rows, gate, up, offsets, act, engine, keep)
        return outs[0]
    made: dict[str, Tensor] = {}
    g, u = _Pair.apply(engine, act, made, rows, gate.detach(), up.detach(), offsets)
    return activated(g, u, engine, act, sinks, rows, gate, up, offsets, made)


def activated(
    g: Tensor,
    u: Tensor,
    engine: str,
    act: str,
    sinks: Sequence[Sink | None],
    rows: Tensor,
    gate: Tensor,
    up: Tensor,
    offsets: Tensor,
    made: dict[str, Tensor],
) -> Tensor:
    """act(g) * u, which is made["y"], from whose gradient those of gate and up follow too."""
    if gate.requires_grad or up.requires_grad:
        g, u = Join.apply(g, u, *_PairWeights.apply(engine, sinks, rows.detach(), offsets, gate, up))
    y: Tensor = _Gate.apply(engine, act, made, offsets, g, u)
    return y


class _Rows(Function):
    @staticmethod
    def forward(
        ctx: Any, engine: str, rows: Tensor, weights: Tensor, bias: Tensor | None, offsets: Tensor
    ) -> Tensor:
        ctx.save_for_backward(weights, offsets)
        ctx.engine = engine
        y: Tensor = nodes.op("grouped_matmul")([rows], [weights], offsets, bias, engine)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        weights, offsets = ctx.saved_tensors
        drows = nodes.op("grouped_matmul")([dy], [weights.mT], offsets, None, ctx.engine)
        return None, drows, None, None, None


class _Weights(Function):
    @staticmethod
    def forward(
        ctx: Any,
        engine: str,
        sink: Sink | None,
        rows: Tensor,
        offsets: Tensor,
        weights: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(rows, offsets)
        ctx.engine, ctx.sink = engine, sink
        return token(rows, rows.shape[0], weights.shape[1])

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        rows, offsets = ctx.saved_tensors
        [dw] = wgrads(ctx.engine, [dy], rows, offsets, [ctx.sink]) if ctx.needs_input_grad[4] else [None]
        wanted = ctx.needs_input_grad[5]
        db = nodes.op("grouped_bias_grad")(dy, offsets, ctx.engine) if wanted else None
        return None, None, None, None, dw, db


class _Pair(Function):
    """Both products, and in `made` the result, which _Gate hands out: so the gate's backward runs once."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: str,
        act: str,
        made: dict[str, Tensor],
        rows: Tensor,
        gate: Tensor,
        up: Tensor,
        offsets: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(gate, up, offsets)
        ctx.engine = engine
        made["y"], g, u = nodes.op("grouped_gated")(rows, gate, up, offsets, act, engine, True)
        return g, u

    @staticmethod
    @first_order
    def backward(ctx: Any, dg: Tensor, du: Tensor) -> tuple[Any, ...]:
        gate, up, offsets = ctx.saved_tensors
        drows = nodes.op("grouped_matmul")([dg, du], [gate.mT, up.mT], offsets, None, ctx.engine)
        return None, None, None, drows, None, None, None


class _PairWeights(Function):
    @staticmethod
    def forward(
        ctx: Any,
        engine: str,
        sinks: Sequence[Sink | None],
        rows: Tensor,
        offsets: Tensor,
        gate: Tensor,
        up: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, offsets)
        ctx.engine, ctx.sinks = engine, sinks
        return token(rows, rows.shape[0], gate.shape[1]), token(rows, rows.shape[0], up.shape[1])

    @staticmethod
    @first_order
    def backward(ctx: Any, dg: Tensor, du: Tensor) -> tuple[Any, ...]:
        rows, offsets = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        if all(wanted):
            dws = wgrads(ctx.engine, [dg, du], rows, offsets, ctx.sinks)
        else:
            each = zip((dg, du), ctx.sinks, wanted, strict=True)
            dws = [wgrads(ctx.engine, [dy], rows, offsets, [s])[0] if w else None for dy, s, w in each]
        return None, None, None, None, *dws


class _Gate(Function):
    @staticmethod
    def forward(
        ctx: Any, engine: str, act: str, made: dict[str, Tensor], offsets: Tensor, g: Tensor, u: Tensor
    ) -> Tensor:
        ctx.save_for_backward(g, u, offsets)
        ctx.engine, ctx.act = engine, act
        return made.pop("y")

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        g, u, offsets = ctx.saved_tensors
        dg, du = nodes.op("grouped_gated_backward")(dy, g, u, offsets, ctx.act, ctx.engine)
        return None, None, None, None, dg, du


def wgrads(
    engine: str, dys: Sequence[Tensor], rows: Tensor, offsets: Tensor, sinks: Sequence[Sink | None]
) -> list[Tensor | None]:
    """dw_i [E, N_i, K], or None where its sink took it; with sinks one after another, so that none waits for others."""
    op = nodes.op("grouped_wgrad")
    if all(sink is None for sink in sinks):
        made: list[Tensor | None] = op(dys, rows, offsets, engine, rows.dtype)
        return made
    out = []
    for dy, sink in zip(dys, sinks, strict=True):
        [dw] = op([dy], rows, offsets, engine, wgrad_dtype(rows, [sink]))
        out.append(deliver(dw, sink, rows.dtype))
    return out


def _check(rows: Tensor, offsets: Tensor, **weights: Tensor) -> None:
    """Raises ValueError for shapes, dtypes or devices that do not fit."""
    for name, w in weights.items():
        if rows.dim() != 2 or w.dim() != 3 or w.shape[2] != rows.shape[1]:
            raise ValueError(
                f"got rows {tuple(rows.shape)} and {name} {tuple(w.shape)}, wanted [R, K] and [E, N, K]"
            )
        if offsets.dtype != torch.int32 or offsets.shape != (w.shape[0] + 1,) or not w.shape[0]:
            raise ValueError(
                f"got offsets {tuple(offsets.shape)} of {offsets.dtype} for {name} {tuple(w.shape)}, wanted [E + 1] of "
                "int32 for one expert or more"
            )
    if not rows.dtype.is_floating_point:
        raise ValueError(f"rows are {rows.dtype}; the operations take floating-point tensors")
    if offsets.device != rows.device:
        raise ValueError(f"rows are on {rows.device}, offsets on {offsets.device}")
    _check_alike(rows, **weights)


def _check_alike(rows: Tensor, **others: Tensor | None) -> None:
    for name, t in others.items():
        if t is not None and (t.dtype != rows.dtype or t.device != rows.device):
            raise ValueError(f"rows are {rows.dtype} on {rows.device}, {name} {t.dtype} on {t.device}")
