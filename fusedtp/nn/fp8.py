"""A linear layer that multiplies in fp8, forward and for the gradient of its input; parallel as any other.

    forward   y = q(x) @ q(w).T + b           e4m3 by e4m3, scales of the rows of x and of w
    dgrad     dx = q(dy) @ q(w.T).T           e5m2 by e4m3, scales of the rows of dy and of the columns of w
    wgrad     dw = q(dy).T @ q(x)             of the same numbers, in the dtype of x
    saved     x in fp8 with its scales, a byte a number; the weight

q() is quantize of ops/fp8.py, by current scaling: a scale is made of the numbers that it is for, each time. Parallel:

    column-parallel   q(x) is gathered in fp8 (scaled_all_gather_matmul), for dw once more, half the bytes of 16 bits;
                      dx by scaled_matmul_reduce_scatter
    row-parallel      y by scaled_matmul_reduce_scatter, of each rank's columns with their own scales; q(dy) is gathered
                      in fp8, once for dx and dw
    without sequence parallelism the product is fp8 and the sum over ranks a plain all-reduce

Note [Scales along the contraction]
A product is scaled after its sum, so a scale must be the same all along the sum: scales of rows serve x @ w.T, where
rows are not summed over. dy.T @ x sums over the rows of both, and their scales do not factor out. So wgrad multiplies
values * scale in the dtype of x, bf16 or fp32, which hold them exactly (Note [Scales that are powers of two] in
ops/fp8.py). And w is quantized twice, by rows for y and by columns for dx: there the sum runs along the other side. The
copy of w.T is also what the matrix units of Hopper want, whose fp8 operands have the side that is summed over
contiguous.

Note [What fp8 loses]
With e(x) = max(u |x|, v M), M the largest magnitude of a row: u = 2**-4, v = 2**-17 of e4m3; u = 2**-3, v = 2**-31 of
e5m2. A number is off by at most e, so entry by entry, of exact sums,

    |y - x @ w.T|    <=  (|x| + e(x)) @ (|w| + e(w)).T - |x| @ |w|.T          about 2**-3 of |x| @ |w|.T at most
    |dx - dy @ w|    <=  (|dy| + e(dy)) @ (|w| + e(w)) - |dy| @ |w|           about 3 * 2**-4
    |dw - dy.T @ x|  <=  (|dy| + e(dy)).T @ (|x| + e(x)) - |dy|.T @ |x|       about 3 * 2**-4

and what fp32 sums and the rounding of the result lose, as of any product of that dtype. These are worst cases: numbers
are rounded as often up as down, and of K random terms about the square root of K adds up.

Sources: Micikevicius et al. 2022, "FP8 formats for deep learning"; DeepSeek-V3 (2024), section 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fusedtp import ops
from fusedtp.comm import Group, place, propagate_errors
from fusedtp.ops import fp8
from fusedtp.ops.fp8 import E4M3, E5M2
from fusedtp.ops.main_grad import MainGrad, main_grads_of, weight_grad
from fusedtp.ops.operation import OPERATIONS, Spec, as_autocast, check_linear, needs_grad, wanted
from fusedtp.ops.rows import rows_of_full, rows_of_shard
from fusedtp.ops.tokens import all_reduce_sum

from .layout import TokenLayout
from .linear import Linear

MIN_ROWS = 2048  # as of the fused kernels, ops.engines.DEFAULT_CROSSOVER_ROWS
DTYPES = (torch.bfloat16, torch.float32)


class FP8Linear(Linear):
    """y = x @ w.T + b, multiplied in fp8: a Linear in all else, its parameters too.

        x         [T, K]   bfloat16 or float32
        weight    [N, K]   cast to x.dtype, then quantized
        min_rows  with fewer tokens (of all ranks) the layer computes in x.dtype, forward and backward: small products
                  take as long in fp8, or longer, and quantizing comes on top (torch issue 179770: a third of the speed
                  of bf16 up to 500 rows)
        return    [T, N]   of x.dtype, summed in fp32

    Forward, dgrad, wgrad, errors of fp8 and what parallel layers send: the docstring of fusedtp.nn.fp8. A CPU, and a
    GPU that multiplies no fp8, multiply the same numbers in a wider dtype.

    Raises ValueError for another dtype of x: fp16 does not hold all that fp8 with its scale does.
    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; DeepSeek-V3 (2024), section 3.3.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        min_rows: int = MIN_ROWS,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.operations = InFP8(min_rows)

    def forward(self, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        if self.parallel is not None:
            return self.parallel.linear(x, self, layout)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return self.operations.local(x, self.weight.to(x.dtype), bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8 from {self.operations.min_rows} rows on"


@dataclass(frozen=True)
class InFP8:
    """What a parallel layer does with a linear layer, in fp8: the signatures are those of the operations it replaces.

    min_rows   with fewer rows, of all ranks, those run instead
    """

    min_rows: int

    def gather(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        group: Group,
        *,
        biases: Sequence[Tensor | None],
        sizes: Sequence[int] | None = None,
        dim: int = 0,
        engine: str = "auto",
        layer: str = "",
    ) -> tuple[Tensor, ...]:
        """all_gather_matmul: x [T_r, K], w_i [N_i, K] -> [T, N_i]."""
        at = place(group)
        with propagate_errors(at):
            rows = rows_of_shard(x, at, sizes, dim)
            if rows.total < self.min_rows:
                how: dict[str, Any] = dict(biases=biases, sizes=sizes, dim=dim, engine=engine, layer=layer)
                return ops.all_gather_matmul(x, weights, group, **how)
            main_grads = main_grads_of(weights)
            x, *operands = as_autocast(at.device_type, x, *weights, *biases)
            check_linear(at, x, operands[: len(weights)], operands[len(weights) :])
            _check_dtype(x)
            spec = Spec(at.name, at.rank, rows.sizes, rows.batch, engine, needs_grad(x, *operands), layer)
            ys = _Gathered.apply(spec, main_grads, x if dim == 0 else x.flatten(0, -2), *operands)
            return ys if dim == 0 else tuple(y.view(rows.batch, rows.length, y.shape[1]) for y in ys)

    def scatter(
        self,
        x: Tensor,
        weight: Tensor,
        group: Group,
        *,
        bias: Tensor | None = None,
        sizes: Sequence[int] | None = None,
        dim: int = 0,
        engine: str = "auto",
        layer: str = "",
    ) -> Tensor:
        """matmul_reduce_scatter: x [T, K_r], w [N, K_r] -> [T_r, N]."""
        at = place(group)
        with propagate_errors(at):
            rows = rows_of_full(x.shape, at, sizes, dim)
            if rows.total < self.min_rows:
                how: dict[str, Any] = dict(bias=bias, sizes=sizes, dim=dim, engine=engine, layer=layer)
                return ops.matmul_reduce_scatter(x, weight, group, **how)
            (main_grad,) = main_grads_of([weight])
            x, weight, bias = as_autocast(at.device_type, x, weight, bias)
            check_linear(at, x, [weight], [bias])
            _check_dtype(x)
            spec = Spec(at.name, at.rank, rows.sizes, rows.batch, engine, needs_grad(x, weight, bias), layer)
            y: Tensor = _Scattered.apply(spec, main_grad, x if dim == 0 else x.flatten(0, -2), weight, bias)
            return y if dim == 0 else y.view(rows.batch, rows.sizes[at.rank], y.shape[1])

    def local(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """local_linear: x [..., K], w [N, K] -> [..., N], without ranks."""
        if x.shape[:-1].numel() < self.min_rows:
            return ops.local_linear(x, weight, bias)
        (main_grad,) = main_grads_of([weight])
        x, weight, bias = as_autocast(x.device.type, x, weight, bias)
        _check_dtype(x)
        (y,) = _Gathered.apply(None, [main_grad], x.flatten(0, -2), weight, bias)
        made: Tensor = y
        return made.view(*x.shape[:-1], weight.shape[0])

    def all_reduce(
        self,
        x: Tensor,
        weight: Tensor,
        group: Group,
        *,
        bias: Tensor | None = None,
        engine: str = "auto",
        layer: str = "",
    ) -> Tensor:
        """matmul_all_reduce: x [..., K_r], w [N, K_r] -> [..., N] on every rank."""
        if x.shape[:-1].numel() < self.min_rows:
            return ops.matmul_all_reduce(x, weight, group, bias=bias, engine=engine, layer=layer)
        y = all_reduce_sum(self.local(x, weight), group, layer)
        return y if bias is None else y + bias


def _check_dtype(x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"FP8Linear got x of {x.dtype}; it takes one of {DTYPES}")


class _Gathered(Function):
    """y_i = q(x) @ q(w_i).T + b_i, x of all ranks. Without a spec, x is whole here and nothing travels."""

    @staticmethod
    def forward(
        ctx: Any,
        spec: Spec | None,
        main_grads: Sequence[MainGrad | None],
        x: Tensor,
        *operands: Tensor | None,
    ) -> tuple[Tensor, ...]:
        n = len(main_grads)
        weights: Any = operands[:n]
        need_x, need_weights = ctx.needs_input_grad[2], any(ctx.needs_input_grad[3 : 3 + n])
        values, scale = fp8.quantize(x)
        packed = fp8.pack(values, scale) if spec is not None or need_weights else None
        quantized = [fp8.quantize(w) for w in weights]
        if spec is None:
            ys = [
                fp8.product(values, scale, *w, b, x.dtype)
                for w, b in zip(quantized, operands[n:], strict=True)
            ]
        else:
            w_values, w_scales = ([each[i] for each in quantized] for i in range(2))
            gather = OPERATIONS["scaled_all_gather_matmul"]
            ys = gather(spec, packed, E4M3, w_values, w_scales, [*operands[n:]], x.dtype, False)
        ctx.save_for_backward(packed if need_weights else None, *(weights if need_x else ()))
        ctx.spec = None if spec is None else spec._replace(needs_grad=0)
        ctx.main_grads, ctx.k, ctx.dtype = main_grads, x.shape[1], x.dtype
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        packed, *weights = ctx.saved_tensors
        n, spec = len(ctx.main_grads), ctx.spec
        need_x, *needs = wanted(ctx)[2:]
        dx: Tensor | None = None
        dws: list[Tensor | None] = [None] * n
        if need_x or any(needs[:n]):
            values, scale = fp8.quantize(torch.cat(dys, 1) if n > 1 else dys[0], E5M2)
        if need_x:
            w, w_scale = fp8.quantize((torch.cat(weights) if n > 1 else weights[0]).t().contiguous())
            if spec is None:
                dx = fp8.product(values, scale, w, w_scale, None, ctx.dtype)
            else:
                scatter = OPERATIONS["scaled_matmul_reduce_scatter"]
                dx = scatter(spec, values, scale, w, w_scale, None, ctx.dtype)
        if any(needs[:n]):
            full = packed if spec is None else OPERATIONS["all_gather_rows"](spec, packed)
            x = fp8.dequantize(*fp8.unpack(full, ctx.k, E4M3), ctx.dtype)
            meant = fp8.dequantize(values, scale, ctx.dtype).split([dy.shape[1] for dy in dys], 1)
            for i, dy in enumerate(meant):
                dws[i] = weight_grad(dy, x, ctx.main_grads[i]) if needs[i] else None
        dbs = [dy.sum(0) if need else None for dy, need in zip(dys, needs[n:], strict=True)]
        return None, None, dx, *dws, *dbs


class _Scattered(Function):
    """y = q(x) @ q(w).T summed over ranks, + b: this rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, spec: Spec, main_grad: MainGrad | None, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        _, _, need_x, need_weight, _ = ctx.needs_input_grad
        values, scale = fp8.quantize(x)
        y: Tensor = OPERATIONS["scaled_matmul_reduce_scatter"](
            spec, values, scale, *fp8.quantize(weight), bias, x.dtype
        )
        kept = (values, scale) if need_weight else (None, None)
        ctx.save_for_backward(*kept, weight if need_x else None)
        ctx.spec, ctx.main_grad, ctx.dtype, ctx.gathered_dy = (
            spec._replace(needs_grad=0),
            main_grad,
            x.dtype,
            None,
        )
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        values, scale, weight = ctx.saved_tensors
        _, _, need_x, need_w, need_b = wanted(ctx)
        dx = dw = full = None
        if need_x:
            keep = ctx.needs_input_grad[3]
            w, w_scale = fp8.quantize(weight.t().contiguous())
            packed, gather = fp8.pack(*fp8.quantize(dy, E5M2)), OPERATIONS["scaled_all_gather_matmul"]
            dx, *gathered = gather(ctx.spec, packed, E5M2, [w], [w_scale], [None], ctx.dtype, keep)
            full = gathered[0] if keep else None
            if keep and not need_w:  # a weight pass follows
                ctx.gathered_dy = dy, dy._version, full
        elif ctx.gathered_dy is not None:
            (of, version, kept), ctx.gathered_dy = ctx.gathered_dy, None
            if of is dy and version == dy._version:  # else it is of another backward pass
                full = kept
        if need_w:
            if full is None:
                full = OPERATIONS["all_gather_rows"](ctx.spec, fp8.pack(*fp8.quantize(dy, E5M2)))
            meant = fp8.dequantize(*fp8.unpack(full, dy.shape[1], E5M2), ctx.dtype)
            dw = weight_grad(meant, fp8.dequantize(values, scale, ctx.dtype), ctx.main_grad)
        return None, None, dx, dw, dy.sum(0) if need_b else None
