"""The last matmul of a mixture of experts with its combine as a torch custom op, with fake and autograd.

    fusedtp::moe_matmul_combine   h [max_rows, K], experts [E_r, N, K], weights [T_r, k] -> out [T_r, N], and the
                                  products [max_rows, N] if `keep`

As in grouped_library.py, the autograd registered here is what torch.compile and opcheck see; eager code goes through
the nodes of matmul_combine.py. `local` is the engine of the matmuls of backward.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import gradients
from ..first_order import first_order
from ..library import as_given
from ..ordered import ordered
from ..profile import record_function
from . import exchange
from .declare import PLAN, PLAN_LENGTH, custom_op, taken
from .grouped_engines import fp32_precision
from .library import combine_gradients


@custom_op(
    "moe_matmul_combine",
    f"Tensor h, Tensor experts, Tensor offsets, bool keep, str local, Tensor weights, Tensor row_weights, {PLAN}",
    "Tensor[]",
)
def moe_matmul_combine(
    h: Tensor, experts: Tensor, offsets: Tensor, keep: bool, local: str, weights: Tensor, row_weights: Tensor,
    *of_all: Any,
) -> list[Tensor]:  # fmt: skip
    plan, at = taken(*of_all)
    with as_given(h), record_function(f"fusedtp.moe_matmul_combine.{at.engine}"):
        out, y = exchange.multiply_and_gather(h, experts, offsets, weights, plan, at, keep, fp32_precision())
    return [out] if y is None else [out, y]


@moe_matmul_combine.register_fake
def _(
    h: Tensor, experts: Tensor, offsets: Tensor, keep: bool, local: str, weights: Tensor, row_weights: Tensor,
    *of_all: Any,
) -> list[Tensor]:  # fmt: skip
    _plan, at = taken(*of_all)
    n = experts.shape[1]
    return [h.new_empty(rows, n) for rows in ((at.tokens, at.max_rows) if keep else (at.tokens,))]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    h, experts, offsets, ctx.keep, ctx.local, *combined = inputs[:10]
    products = output[1] if ctx.keep else h
    ctx.save_for_backward(h, experts, offsets, products, *combined)
    ctx.at = inputs[10:]
    if ctx.keep:
        ctx.mark_non_differentiable(output[1])


@first_order
def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    h, experts, offsets, *combined = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    if wanted[5] and not ctx.keep:
        raise RuntimeError("fusedtp::moe_matmul_combine has no gradients of weights without `keep`")
    dy, dweights = combine_gradients(grads[0], combined, ctx.at, wanted[5])
    dh = dexperts = None
    if wanted[0]:
        dh = gradients.op("grouped_matmul")([dy], [experts.mT], offsets, None, ctx.local)
    if wanted[1]:
        dexperts = gradients.op("grouped_wgrad")(dy, h, offsets, ctx.local, h.dtype)
    return dh, dexperts, None, None, None, dweights, None, *([None] * PLAN_LENGTH)


moe_matmul_combine.register_autograd(_backward, setup_context=_save)
gradients.BODIES["moe_matmul_combine"] = moe_matmul_combine._init_fn
ordered(moe_matmul_combine)
