"""A linear layer that multiplies in fp8, for the forward and the input gradient; parallel like any other linear.

    forward   y = q(x) @ q(w).T + b           e4m3 by e4m3, scales for the rows of x and of w
    dgrad     dx = q(dy) @ q(w.T).T           e5m2 by e4m3, scales for the rows of dy and the columns of w
    wgrad     dw = q(dy).T @ q(x)             of the same numbers, in the dtype of x
    saved     x in fp8 with its scales, one byte per number; the weight

This is with row scales; with one scale per tensor, wgrad is in fp8 too. q() is quantize of ops/fp8.py. Parallel:

    column-parallel   q(x) is gathered in fp8 (scaled_all_gather_matmul), and again for dw: half the bytes of 16 bits;
                      dx by scaled_matmul_reduce_scatter
    row-parallel      y by scaled_matmul_reduce_scatter, where each rank's columns have their own scales; q(dy) is
                      gathered in fp8, once for dx and dw
    without sequence parallelism y of a row-parallel layer by scaled_matmul_all_reduce; gradients are local

Note [Scales along the contraction]
A product is scaled after its sum, so a scale must be constant along the summed dimension: row scales work for x @ w.T,
which does not sum over rows. dy.T @ x sums over the rows of both, so their scales do not factor out. Therefore wgrad
multiplies values * scale in the dtype of x, bf16 or fp32, which represent them exactly, see
Note [Scales that are powers of two] in ops/fp8.py. And w is quantized twice, by rows for y and by columns for dx,
because dx sums over the other dimension. The matrix units of Hopper need the copy of w.T anyway, since their fp8
operands must be contiguous along the summed dimension.

Note [Delayed scaling]
A scale computed from the current numbers needs a pass over them first, and a tensor scale also a message between all
ranks. With a history, scales come from the largest magnitudes of the last steps, which are known beforehand. In
training the layer records the magnitudes of this step in its buffer `amax`, and `advance_fp8_`, once per step, adds
them to the histories of all layers, as the maximum over ranks; a tensor that was not seen, or was all zeros, keeps its
last magnitude. Numbers beyond the scale saturate to the largest fp8 number. Until the history has a magnitude of its
tensor, the current scale is used.
Both buffers are in the state dict. A block that is recomputed for its backward (activation checkpointing) has the same
scales both times.

Note [What fp8 loses]
With e(x) = max(u |x|, v M), M the largest magnitude of a row (or tensor): u = 2**-4, v = 2**-17 for e4m3; u = 2**-3,
v = 2**-31 for e5m2. A number is off by at most e, so for each entry of exact sums,

    |y - x @ w.T|    <=  (|x| + e(x)) @ (|w| + e(w)).T - |x| @ |w|.T          about 2**-3 of |x| @ |w|.T at most
    |dx - dy @ w|    <=  (|dy| + e(dy)) @ (|w| + e(w)) - |dy| @ |w|           about 3 * 2**-4
    |dw - dy.T @ x|  <=  (|dy| + e(dy)).T @ (|x| + e(x)) - |dy|.T @ |x|       about 3 * 2**-4

plus the errors of fp32 sums and of rounding the result, as in any product of that dtype. These are worst cases: numbers
are rounded up as often as down, so the errors of K random terms add up to about the square root of K of them.

Sources: Micikevicius et al. 2022, "FP8 formats for deep learning"; DeepSeek-V3 (2024), section 3.3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from fusedtp import ops
from fusedtp.comm import Group, communicator, place, propagate_errors
from fusedtp.comm.constant import constant_to_compiler
from fusedtp.ops import fp8
from fusedtp.ops.fp8 import E4M3, E5M2
from fusedtp.ops.main_grad import MainGrad, accumulate_grad, main_grads_of, weight_grad
from fusedtp.ops.operation import OPERATIONS, Spec, as_autocast, check_linear, needs_grad, wanted
from fusedtp.ops.rows import rows_of_full, rows_of_shard, split

from .linear import Linear

MIN_ROWS = 2048  # as of the fused kernels, ops.engines.DEFAULT_CROSSOVER_ROWS
DTYPES = (torch.bfloat16, torch.float32)


class FP8Linear(Linear):
    """y = x @ w.T + b, multiplied in fp8; otherwise a Linear, with the same parameters.

        x         [T, K]   bfloat16 or float32
        weight    [N, K]   cast to x.dtype, then quantized
        scales    "row": one per row of x, w and dy, and per column of w; "tensor": one per tensor
        history   0: scales are computed from the current numbers. Otherwise, with scales="tensor", from the largest
                  magnitudes of this many last steps: Note [Delayed scaling]
        margin    for delayed scaling: scales are 2**margin times as large as the history requires
        min_rows  with fewer tokens (over all ranks) the layer computes in x.dtype, forward and backward: small products
                  are not faster in fp8, and quantization is extra work (torch issue 179770: its fused fp8
                  reduce-scatter ran at a third of the unfused one's speed up to 448 rows)
        return    [T, N]   in x.dtype, summed in fp32

    For forward, dgrad, wgrad, fp8 errors and communication see the docstring of fusedtp.nn.fp8. A CPU, or a GPU without
    fp8 matmuls, multiplies the same numbers in a wider dtype.

    Raises ValueError for options that exclude each other, and for other dtypes of x: fp16 cannot represent all fp8
    numbers with their scales. RuntimeError if delayed scaling is compiled.
    Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; DeepSeek-V3 (2024), section 3.3.
    """

    amax: Tensor
    amax_history: Tensor
    operations: InFP8

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        scales: str = "row",
        history: int = 0,
        margin: int = 0,
        min_rows: int = MIN_ROWS,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if scales not in ("row", "tensor"):
            raise ValueError(f"scales is {scales!r}; it must be 'row' or 'tensor'")
        if history < 0 or margin < 0 or (history and scales != "tensor") or (margin and not history):
            raise ValueError(
                f"history is {history}, margin {margin}, scales {scales!r}: history and margin must not be negative, "
                "history needs scales='tensor', and margin needs a history"
            )
        if min_rows < 0:
            raise ValueError(f"min_rows is {min_rows}, must not be negative")
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        scaling: Any = Current(scales == "row")
        if history:
            self.register_buffer("amax_history", torch.zeros(history, 3, device=device, dtype=torch.float32))
            self.register_buffer("amax", torch.zeros(3, device=device, dtype=torch.float32))
            scaling = Delayed(self, margin)
        self.operations = InFP8(min_rows, scaling)

    def alone(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N], multiplied in fp8 if there are at least min_rows rows."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return self.operations.local(x, self.weight.to(x.dtype), bias)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "amax" in self._buffers:
            self.amax.zero_()
            self.amax_history.zero_()
            self.operations.scaling.seen = NOTHING

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Magnitudes stay fp32 if the layer is cast."""
        before = {name: self._buffers[name] for name in ("amax", "amax_history") if name in self._buffers}
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Handles state dicts without a history (of a Linear) or with a history of another length."""
        if "amax" in self._buffers:
            found = state_dict.get(f"{prefix}amax_history", self.amax_history.new_zeros(0, 3))
            kept = found[: len(self.amax_history)]
            filling = kept.new_zeros(len(self.amax_history) - len(kept), 3)
            state_dict[f"{prefix}amax_history"] = torch.cat([kept, filling])
            state_dict.setdefault(f"{prefix}amax", self.amax.new_zeros(3))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if "amax" in self._buffers and not self.amax.is_meta:
            self.operations.scaling.seen = tuple((self.amax_history > 0).any(0).tolist())

    def extra_repr(self) -> str:
        scaling = self.operations.scaling
        return f"{super().extra_repr()}, {scaling} in fp8 from {self.operations.min_rows} rows on"


# -- scales ----------------------------------------------------------------------------------------------------------

Quantized = tuple[Tensor, Tensor]  # values and scales


class Scaling(ABC):
    """Quantization of a layer's operands. spec: the ranks that hold other parts of the same tensors, or None."""

    by_row = False

    @abstractmethod
    def operands(self, x: Tensor, w: Tensor, spec: Spec | None) -> tuple[Quantized, Quantized]:
        """x [T, K] and w [N, K], for the forward."""

    @abstractmethod
    def gradient(self, dy: Tensor, spec: Spec | None) -> Quantized:
        """dy [T, N]."""

    def transposed(self, w: Tensor, w_scale: Tensor) -> Quantized:
        """w.T [K, N], for dgrad; w had the scale w_scale in the forward."""
        return fp8.quantize(w.t()) if self.by_row else (fp8.values_of(w.t(), w_scale, E4M3), w_scale)


@dataclass(frozen=True)
class Current(Scaling):
    """Scales computed from the current numbers. Tensor scales cover all ranks' parts: a gather of a few numbers."""

    by_row: bool

    def operands(self, x: Tensor, w: Tensor, spec: Spec | None) -> tuple[Quantized, Quantized]:
        if self.by_row:
            return fp8.quantize(x), fp8.quantize(w)
        largest = of_all_ranks(torch.cat([fp8.largest_of(t, False) for t in (x, w)], 1), spec)
        return _quantized(x, largest[:, :1], E4M3), _quantized(w, largest[:, 1:], E4M3)

    def gradient(self, dy: Tensor, spec: Spec | None) -> Quantized:
        if self.by_row:
            return fp8.quantize(dy, E5M2)
        return _quantized(dy, of_all_ranks(fp8.largest_of(dy, False), spec), E5M2)

    def __str__(self) -> str:
        return f"{'row' if self.by_row else 'tensor'} scales"


NOTHING = (False, False, False)  # of x, w and dy


class Delayed(Scaling):
    """Tensor scales from the largest magnitudes of the last steps: Note [Delayed scaling].

    seen   whether the history has a magnitude of x, of w, of dy; the same on all ranks, like the histories
    """

    def __init__(self, layer: Any, margin: int) -> None:
        self.layer, self.margin, self.seen = layer, margin, NOTHING

    def _scale(self, at: int, kind: torch.dtype) -> Tensor:
        largest = self.layer.amax_history[:, at].amax().view(1, 1)
        return fp8.power_of_two_scales(largest * 2.0**self.margin, kind)

    def _record(self, at: int, x: Tensor) -> None:
        if self.layer.training:
            here = self.layer.amax[at]
            here.copy_(torch.maximum(here, fp8.largest_of(x, False).view(())))

    def operands(self, x: Tensor, w: Tensor, spec: Spec | None) -> tuple[Quantized, Quantized]:
        if torch.compiler.is_compiling():
            _refuse_to_compile()
        self._record(0, x)
        self._record(1, w)
        if not (self.seen[0] and self.seen[1]):
            return Current(False).operands(x, w, spec)
        x_scale, w_scale = self._scale(0, E4M3), self._scale(1, E4M3)
        return (fp8.values_of(x, x_scale, E4M3), x_scale), (fp8.values_of(w, w_scale, E4M3), w_scale)

    def gradient(self, dy: Tensor, spec: Spec | None) -> Quantized:
        self._record(2, dy)
        if not self.seen[2]:
            return Current(False).gradient(dy, spec)
        scale = self._scale(2, E5M2)
        return fp8.values_of(dy, scale, E5M2), scale

    def __str__(self) -> str:
        return f"tensor scales of {len(self.layer.amax_history)} steps"


# Runs at trace time: an error inside traced code would only cause a graph break.
@constant_to_compiler
def _refuse_to_compile() -> None:
    raise RuntimeError("an FP8Linear with a history cannot be compiled: a graph would not update it; use history=0")


def _quantized(x: Tensor, largest: Tensor, kind: torch.dtype) -> Quantized:
    scale = fp8.power_of_two_scales(largest, kind)
    return fp8.values_of(x, scale, kind), scale


def of_all_ranks(largest: Tensor, spec: Spec | None) -> Tensor:
    """[1, n] fp32 -> [1, n], the maximum over ranks."""
    if spec is None:
        return largest
    at = spec._replace(sizes=(1,) * len(spec.sizes), batch=1, needs_grad=0)
    return OPERATIONS["all_gather_rows"](at, largest).amax(0, keepdim=True)


def advance_fp8_(model: nn.Module) -> None:
    """Add the magnitudes of this step to the history of every FP8Linear that has one: once per step, after backward.

    Collective: ranks that share layers exchange three numbers per layer, all layers of a group in one gather, so that
    their histories, and scales, are equal. Note [Delayed scaling] in fusedtp.nn.fp8.
    """
    of_group: dict[str, list[Any]] = {}
    for layer in model.modules():
        if isinstance(layer, FP8Linear) and isinstance(layer.operations.scaling, Delayed):
            group = getattr(layer.parallel, "group", "") or getattr(layer.parallel, "members", "")
            of_group.setdefault(group, []).append(layer)
    with torch.no_grad():
        for group, layers in of_group.items():
            seen = torch.cat([layer.amax for layer in layers]).view(1, -1)
            if group:
                comm = communicator(group)
                seen = of_all_ranks(seen, Spec(group, comm.rank, (1,) * comm.world_size))
            for layer, amax in zip(layers, seen.view(-1, 3), strict=True):
                newest = torch.where(amax > 0, amax, layer.amax_history[0])  # if not seen, keep the last magnitude
                layer.amax_history.copy_(torch.cat([newest.view(1, 3), layer.amax_history[:-1]]))
                layer.amax.zero_()
                if not all(layer.operations.scaling.seen):  # synchronizes with the device, in the first steps only
                    layer.operations.scaling.seen = tuple((layer.amax_history > 0).any(0).tolist())


# -- operations ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InFP8:
    """The fp8 versions of a linear layer's operations, with the signatures of the operations that they replace.

    min_rows   with fewer rows (over all ranks) the original operations run
    """

    min_rows: int
    scaling: Any

    def instead_of(self, operation: str, tokens: int) -> str:
        """The name of the operation that runs instead of one in the working dtype, for this number of tokens."""
        if tokens < self.min_rows:
            return operation
        return "fp8 matmul" if operation == "matmul" else f"scaled_{operation}"

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
            flat = x if dim == 0 else x.flatten(0, -2)
            ys = _Gathered.apply(spec, None, self.scaling, main_grads, flat, *operands)
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
            rows = rows_of_full(x, at, sizes, dim)
            if rows.total < self.min_rows:
                how: dict[str, Any] = dict(bias=bias, sizes=sizes, dim=dim, engine=engine, layer=layer)
                return ops.matmul_reduce_scatter(x, weight, group, **how)
            (main_grad,) = main_grads_of([weight])
            x, weight, bias = as_autocast(at.device_type, x, weight, bias)
            check_linear(at, x, [weight], [bias])
            _check_dtype(x)
            spec = Spec(at.name, at.rank, rows.sizes, rows.batch, engine, needs_grad(x, weight, bias), layer)
            y: Tensor = _Scattered.apply(
                spec, self.scaling, main_grad, x if dim == 0 else x.flatten(0, -2), weight, bias
            )
            return y if dim == 0 else y.view(rows.batch, rows.sizes[at.rank], y.shape[1])

    def local(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """local_linear: x [..., K], w [N, K] -> [..., N], without ranks."""
        if x.shape[:-1].numel() < self.min_rows:
            return ops.local_linear(x, weight, bias)
        (main_grad,) = main_grads_of([weight])
        x, weight, bias = as_autocast(x.device.type, x, weight, bias)
        _check_dtype(x)
        flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
        (y,) = _Gathered.apply(None, None, self.scaling, [main_grad], flat, weight, bias)
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
        at = place(group)
        with propagate_errors(at):
            if x.shape[:-1].numel() < self.min_rows:
                return ops.matmul_all_reduce(x, weight, group, bias=bias, engine=engine, layer=layer)
            (main_grad,) = main_grads_of([weight])
            x, weight, bias = as_autocast(at.device_type, x, weight, bias)
            check_linear(at, x, [weight], [bias])
            _check_dtype(x)
            flat = x if x.dim() == 2 else x.flatten(0, -2)
            sizes, needs = split(flat.shape[0], at.world_size), needs_grad(x, weight, bias)
            summed = Spec(at.name, at.rank, sizes, 1, engine, needs, layer)
            (y,) = _Gathered.apply(None, summed, self.scaling, [main_grad], flat, weight, bias)
            made: Tensor = y
            return made.view(*x.shape[:-1], weight.shape[0])


def _check_dtype(x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise ValueError(f"FP8Linear got x of {x.dtype}; it takes one of {DTYPES}")


class _Gathered(Function):
    """y_i = q(x) @ q(w_i).T + b_i, with x gathered from all ranks. Without a spec, x is whole and no row travels.

    summed   for a single product without a spec: y is summed over these ranks, and dy is the same on all of them
    """

    @staticmethod
    def forward(
        ctx: Any,
        spec: Spec | None,
        summed: Spec | None,
        scaling: Scaling,
        main_grads: Sequence[MainGrad | None],
        x: Tensor,
        *operands: Tensor | None,
    ) -> tuple[Tensor, ...]:
        n = len(main_grads)
        weights: Any = operands[:n]
        need_x, need_weights = ctx.needs_input_grad[4], any(ctx.needs_input_grad[5 : 5 + n])
        w, widths = joined(weights), [w.shape[0] for w in weights]
        (values, scale), (w_values, w_scale) = scaling.operands(x, w, spec)
        packed = fp8.pack(values, scale) if spec is not None or need_weights else None
        each, biases = [*w_values.split(widths)], [*operands[n:]]
        scales = [*w_scale.split(widths)] if scaling.by_row else [w_scale] * n
        if summed is not None:
            all_reduce = OPERATIONS["scaled_matmul_all_reduce"]
            ys = [all_reduce(summed, values, scale, w_values, w_scale, biases[0], x.dtype)]
        elif spec is None:
            of_each = zip(each, scales, biases, strict=True)
            ys = [fp8.product(values, scale, q, s, b, x.dtype) for q, s, b in of_each]
        else:
            gather = OPERATIONS["scaled_all_gather_matmul"]
            ys = gather(spec, packed, E4M3, each, scales, biases, x.dtype, False)
        ctx.save_for_backward(packed if need_weights else None, *((w_scale, *weights) if need_x else ()))
        ctx.spec = None if spec is None else spec._replace(needs_grad=0)
        ctx.scaling, ctx.main_grads, ctx.k, ctx.dtype = scaling, main_grads, x.shape[1], x.dtype
        ctx.quantized = None
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        packed, *of_weights = ctx.saved_tensors
        n, spec = len(ctx.main_grads), ctx.spec
        need_x, *needs = wanted(ctx)[4:]
        dx: Tensor | None = None
        dws: list[Tensor | None] = [None] * n
        versions = [(dy, dy._version) for dy in dys]
        kept, ctx.quantized = ctx.quantized, None
        if kept is not None and all(a is b and v == w for (a, v), (b, w) in zip(kept[0], versions, strict=True)):
            _, values, scale = kept  # otherwise it belongs to another backward pass
        elif need_x or any(needs[:n]):
            values, scale = ctx.scaling.gradient(joined(dys, 1), spec)
        if need_x and not any(needs[:n]) and any(ctx.needs_input_grad[5 : 5 + n]):
            ctx.quantized = versions, values, scale  # keep it for the weight pass that follows
        if need_x:
            w_scale, *weights = of_weights
            w, w_scale = ctx.scaling.transposed(joined(weights), w_scale)
            if spec is None:
                dx = fp8.product(values, scale, w, w_scale, None, ctx.dtype)
            else:
                scatter = OPERATIONS["scaled_matmul_reduce_scatter"]
                dx = scatter(spec, values, scale, w, w_scale, None, ctx.dtype)
        if any(needs[:n]):
            full = packed if spec is None else OPERATIONS["all_gather_rows"](spec, packed)
            x, x_scale = fp8.unpack(full, ctx.k, E4M3)
            for i, dy in enumerate(values.split([dy.shape[1] for dy in dys], 1)):
                if needs[i]:
                    dws[i] = weight_gradient(ctx.scaling, dy, scale, x, x_scale, ctx.main_grads[i], ctx.dtype)
        dbs = [dy.sum(0) if need else None for dy, need in zip(dys, needs[n:], strict=True)]
        return None, None, None, None, dx, *dws, *dbs


class _Scattered(Function):
    """y = q(x) @ q(w).T summed over ranks, + b; returns this rank's rows."""

    @staticmethod
    def forward(
        ctx: Any,
        spec: Spec,
        scaling: Scaling,
        main_grad: MainGrad | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        _, _, _, need_x, need_weight, _ = ctx.needs_input_grad
        (values, scale), (w, w_scale) = scaling.operands(x, weight, spec)
        y: Tensor = OPERATIONS["scaled_matmul_reduce_scatter"](spec, values, scale, w, w_scale, bias, x.dtype)
        kept = (values, scale) if need_weight else (None, None)
        ctx.save_for_backward(*kept, *((weight, w_scale) if need_x else (None, None)))
        ctx.spec, ctx.scaling, ctx.main_grad, ctx.dtype = (
            spec._replace(needs_grad=0),
            scaling,
            main_grad,
            x.dtype,
        )
        ctx.gathered_dy = None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, w_scale = ctx.saved_tensors
        *_, need_x, need_w, need_b = wanted(ctx)
        dx = dw = full = None
        if need_x:
            keep = ctx.needs_input_grad[4]
            w, w_scale = ctx.scaling.transposed(weight, w_scale)
            packed = fp8.pack(*ctx.scaling.gradient(dy, ctx.spec))
            gather = OPERATIONS["scaled_all_gather_matmul"]
            dx, *gathered = gather(ctx.spec, packed, E5M2, [w], [w_scale], [None], ctx.dtype, keep)
            full = gathered[0] if keep else None
            if keep and not need_w:  # keep it for the weight pass that follows
                ctx.gathered_dy = dy, dy._version, full
        elif ctx.gathered_dy is not None:
            (of, version, kept), ctx.gathered_dy = ctx.gathered_dy, None
            if of is dy and version == dy._version:  # otherwise it belongs to another backward pass
                full = kept
        if need_w:
            if full is None:
                full = OPERATIONS["all_gather_rows"](ctx.spec, fp8.pack(*ctx.scaling.gradient(dy, ctx.spec)))
            values, scale = fp8.unpack(full, dy.shape[1], E5M2)
            dw = weight_gradient(ctx.scaling, values, scale, x, x_scale, ctx.main_grad, ctx.dtype)
        return None, None, None, dx, dw, dy.sum(0) if need_b else None


def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Several tensors as one operand, with common scales."""
    return torch.cat([*tensors], dim) if len(tensors) > 1 else tensors[0]


def weight_gradient(
    scaling: Scaling,
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    main_grad: MainGrad | None,
    dtype: torch.dtype,
) -> Tensor | None:
    """dw [N, K] from dy [T, N] and x [T, K], or None if it was added to main_grad. Note [Scales along the contraction]

    dy_scale, x_scale   one per row; with tensor scales, the same for all rows
    """
    if scaling.by_row or not len(x):
        return weight_grad(fp8.dequantize(dy, dy_scale, dtype), fp8.dequantize(x, x_scale, dtype), main_grad)
    wide = torch.float32 if main_grad is not None else dtype
    of_dy, of_x = dy_scale.view(-1)[:1], x_scale.view(-1)[:1]
    dw = fp8.product(dy.t().contiguous(), of_dy, x.t().contiguous(), of_x, None, wide)
    return accumulate_grad(dw, main_grad, dtype)
