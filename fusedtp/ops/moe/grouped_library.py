"""The grouped matmuls as torch custom ops, with fakes and autograd.

    fusedtp::grouped_matmul           x_j [R, K], w_j [E, N, K], offsets, b [E, N] -> y [R, N], summed over j
    fusedtp::grouped_wgrad            dy_i [R, N_i], x [R, K], offsets -> dw_i [E, N_i, K] of x's dtype, or fp32
    fusedtp::grouped_bias_grad        dy [R, N], offsets -> db [E, N]
    fusedtp::grouped_gated            x [R, K], gate and up [E, N, K], offsets -> y [R, N], and both products if `keep`
    fusedtp::grouped_gated_backward   dy, g, u [R, N], offsets -> dg, du [R, N]

As in ../library.py, the autograd registered here is what torch.compile and opcheck see; eager code goes through the
nodes of grouped.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..first_order import first_order
from . import grouped_engines as engines
from . import nodes
from .nodes import autocast_disabled


@torch.library.custom_op("fusedtp::grouped_matmul", mutates_args=())
def grouped_matmul(
    xs: Sequence[Tensor], weights: Sequence[Tensor], offsets: Tensor, bias: Tensor | None, engine: str
) -> Tensor:
    check_offsets(offsets, xs[0].shape[0])
    with autocast_disabled(xs[0]):
        return engines.matmul(engine, xs, weights, offsets, bias)


@grouped_matmul.register_fake
def _(
    xs: Sequence[Tensor], weights: Sequence[Tensor], offsets: Tensor, bias: Tensor | None, engine: str
) -> Tensor:
    return xs[0].new_empty(xs[0].shape[0], weights[0].shape[1])


@torch.library.custom_op("fusedtp::grouped_wgrad", mutates_args=())
def grouped_wgrad(
    dys: Sequence[Tensor], x: Tensor, offsets: Tensor, engine: str, dtype: torch.dtype
) -> list[Tensor]:
    with autocast_disabled(x):
        return engines.wgrad(engine, dys, x, offsets, dtype)


@grouped_wgrad.register_fake
def _(dys: Sequence[Tensor], x: Tensor, offsets: Tensor, engine: str, dtype: torch.dtype) -> list[Tensor]:
    return [x.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1], dtype=dtype) for dy in dys]


@torch.library.custom_op("fusedtp::grouped_bias_grad", mutates_args=())
def grouped_bias_grad(dy: Tensor, offsets: Tensor, engine: str) -> Tensor:
    with autocast_disabled(dy):
        return engines.bias_grad(engine, dy, offsets)


@grouped_bias_grad.register_fake
def _(dy: Tensor, offsets: Tensor, engine: str) -> Tensor:
    return dy.new_empty(offsets.shape[0] - 1, dy.shape[1])


@torch.library.custom_op("fusedtp::grouped_gated", mutates_args=())
def grouped_gated(
    x: Tensor, gate: Tensor, up: Tensor, offsets: Tensor, act: str, engine: str, keep: bool
) -> list[Tensor]:
    check_offsets(offsets, x.shape[0])
    with autocast_disabled(x):
        return engines.gated(engine, x, gate, up, offsets, act, keep)


@grouped_gated.register_fake
def _(
    x: Tensor, gate: Tensor, up: Tensor, offsets: Tensor, act: str, engine: str, keep: bool
) -> list[Tensor]:
    return [x.new_empty(x.shape[0], gate.shape[1]) for _ in range(3 if keep else 1)]


@torch.library.custom_op("fusedtp::grouped_gated_backward", mutates_args=())
def grouped_gated_backward(
    dy: Tensor, g: Tensor, u: Tensor, offsets: Tensor, act: str, engine: str
) -> list[Tensor]:
    with autocast_disabled(g):
        return engines.gated_backward(engine, dy, g, u, offsets, act)


@grouped_gated_backward.register_fake
def _(dy: Tensor, g: Tensor, u: Tensor, offsets: Tensor, act: str, engine: str) -> list[Tensor]:
    return [torch.empty_like(g), torch.empty_like(u)]


def check_offsets(offsets: Tensor, rows: int) -> None:
    """Raises ValueError naming the offset that cannot be. Of a GPU's offsets nothing is read."""
    if offsets.device.type != "cpu":
        return
    before, values = 0, offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"offsets[0] is {values[0]}; the rows of expert 0 begin at 0")
    for e, value in enumerate(values):
        if value < before:
            raise ValueError(f"offsets[{e}] is {value}, less than offsets[{e - 1}], {before}")
        before = value
    if before > rows:
        raise ValueError(f"offsets[{len(values) - 1}] is {before}, and there are {rows} rows")


# -- autograd --------------------------------------------------------------------------------------------------------


def _save_matmul(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    xs, weights, offsets, _, ctx.engine = inputs
    ctx.save_for_backward(offsets, *xs, *weights)


@first_order
def _matmul_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    offsets, *saved = ctx.saved_tensors
    n = len(saved) // 2
    xs, weights = saved[:n], saved[n:]
    dxs: Any = [None] * n
    dws: Any = [None] * n
    if any_of(ctx.needs_input_grad[0]):
        dxs = [grouped_matmul([dy], [w.mT], offsets, None, ctx.engine) for w in weights]
    if any_of(ctx.needs_input_grad[1]):
        dws = [grouped_wgrad([dy], x, offsets, ctx.engine, x.dtype)[0] for x in xs]
    db = grouped_bias_grad(dy, offsets, ctx.engine) if ctx.needs_input_grad[3] else None
    return dxs, dws, None, db, None


def _save_gated(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, gate, up, offsets, ctx.act, ctx.engine, keep = inputs
    ctx.save_for_backward(x, gate, up, offsets, *output[1:])
    if keep:
        ctx.mark_non_differentiable(*output[1:])


@first_order
def _gated_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, gate, up, offsets, *products = ctx.saved_tensors
    if not products:
        raise RuntimeError("fusedtp::grouped_gated has no gradients without `keep`")
    dg, du = grouped_gated_backward(grads[0], *products, offsets, ctx.act, ctx.engine)
    wanted = ctx.needs_input_grad
    dx = grouped_matmul([dg, du], [gate.mT, up.mT], offsets, None, ctx.engine) if wanted[0] else None
    dys = [dy for dy, needed in zip((dg, du), wanted[1:3], strict=True) if needed]
    made = iter(grouped_wgrad(dys, x, offsets, ctx.engine, x.dtype) if dys else ())
    return dx, *(next(made) if needed else None for needed in wanted[1:3]), *([None] * 4)


def any_of(flag: Any) -> bool:
    """Of needs_input_grad: of one tensor, or of a list."""
    return any(flag) if isinstance(flag, (list, tuple)) else bool(flag)


grouped_matmul.register_autograd(_matmul_backward, setup_context=_save_matmul)
grouped_gated.register_autograd(_gated_backward, setup_context=_save_gated)

for _op in (grouped_matmul, grouped_wgrad, grouped_bias_grad, grouped_gated, grouped_gated_backward):
    nodes.BODIES[_op._init_fn.__name__] = _op._init_fn
