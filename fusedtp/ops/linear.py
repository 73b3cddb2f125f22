"""Matmuls of one device by Triton kernels that end as a layer does: bias, residual, gate, scales. With autograd.

Layers do not use them by themselves: the vendor's matmul stays their local engine. On CPU tensors they run under
Triton's interpreter only.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from . import launch
from .first_order import first_order
from .matmul import matmul, matmul_into
from .pointwise import ACTIVATIONS

PRECISIONS = ("ieee", "tf32")
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    scale: float | None = None,
    precision: str | None = None,
) -> Tensor:
    """y = scale * (x @ weight.T) + bias + residual, summed in fp32 and rounded once.

    x          [..., K]   fp32, fp16 or bf16, any strides and alignment, as the others
    weight     [N, K]
    bias       [N] or None
    residual   [..., N] or None
    scale      a number, of the product alone; None is 1
    precision  of fp32: "ieee" or "tf32"; None follows torch.backends.cuda.matmul (`allow_tf32`, `fp32_precision`)
    return     [..., N]
    Forward is one kernel, two where few rows split K. dgrad, wgrad: the vendor's matmuls, times scale.
    Raises ValueError for shapes, dtypes or a precision that do not fit, RuntimeError where Triton cannot run.
    """
    _check_shapes(x, weight=weight, bias=bias)
    shape = (*x.shape[:-1], weight.shape[0])
    if residual is not None and residual.shape != shape:
        raise ValueError(f"got a residual {tuple(residual.shape)} for a result {shape}")
    flat = None if residual is None else _rows(residual)
    y: Tensor = _Linear.apply(_rows(x), weight, bias, flat, scale, _precision(precision))
    return y.view(shape)


def gated_linear(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    *,
    activation: str = "silu",
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    precision: str | None = None,
) -> Tensor:
    """y = activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias), summed in fp32 and rounded once.

    x           [..., K]   fp32, fp16 or bf16, any strides and alignment, as the others
    gate, up    [N, K]     two tensors, or the halves of one
    biases      [N] or None
    activation  as transformers calls it: "silu" (SwiGLU), "gelu" (by the error function) or "gelu_pytorch_tanh"
    precision   as in `linear`
    return      [..., N]
    Forward is one pass over x; where a gradient is wanted it keeps both products, and dgrad and wgrad are the vendor's
    matmuls of their gradients.
    Raises ValueError for arguments that do not fit, RuntimeError where Triton cannot run. Source: Shazeer 2020.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"got activation {activation!r}: there are {', '.join(ACTIVATIONS)}")
    _check_shapes(x, gate=gate, gate_bias=gate_bias)
    _check_shapes(x, up=up, up_bias=up_bias)
    if gate.shape != up.shape:
        raise ValueError(f"got gate {tuple(gate.shape)} and up {tuple(up.shape)}")
    keep = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (x, gate, up, gate_bias, up_bias)
    )
    y: Tensor = _GatedLinear.apply(
        _rows(x), gate, up, gate_bias, up_bias, activation, keep, _precision(precision)
    )
    return y.view(*x.shape[:-1], gate.shape[0])


def scaled_matmul(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y = x_scale * w_scale * (x @ weight.T) + bias + residual of fp8 operands, summed in fp32, rounded once.

    x          [M, K]   float8_e4m3fn (or float8_e4m3fnuz, which MI300 has), as weight
    weight     [N, K]
    x_scale    [M, 1], one of each row, or of one element; fp32, as w_scale
    w_scale    [N, 1], or of one element
    bias       [N] of out_dtype or None; residual [M, N] of out_dtype or None
    return     [M, N] of out_dtype: bfloat16, float16 or float32
    Where the device multiplies no fp8 of this kind, the operands are widened to bf16, which holds each of their values,
    and a warning says so. No gradients. Raises ValueError for arguments that do not fit.
    """
    _check_fp8(x, dict(weight=weight), dict(bias=bias), out_dtype)
    shape = (x.shape[0], weight.shape[0])
    _check_scales(x_scale=(x_scale, shape[0]), w_scale=(w_scale, shape[1]))
    if residual is not None and residual.shape != shape:
        raise ValueError(f"got a residual {tuple(residual.shape)} for a result {shape}")
    if residual is not None and residual.dtype != out_dtype:
        raise ValueError(f"got residual {residual.dtype} for out_dtype {out_dtype}")
    _check_devices(x, weight, x_scale, w_scale, bias, residual)
    x, weight = _multiplied(x, weight)
    epilogue = launch.Epilogue(bias, residual, None, x_scale, w_scale)
    return launch.scaled_matmul(x, weight, epilogue, out_dtype)


def scaled_gated_matmul(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    x_scale: Tensor,
    gate_scale: Tensor,
    up_scale: Tensor,
    *,
    activation: str = "silu",
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """y = activation(g + gate_bias) * (u + up_bias) with g = x_scale * gate_scale * (x @ gate.T), u likewise, of fp8.

    x          [M, K]   float8_e4m3fn (or float8_e4m3fnuz, which MI300 has), as gate and up
    gate, up   [N, K]
    x_scale    [M, 1], one of each row, or of one element; fp32, as the others
    gate_scale, up_scale   [N, 1], or of one element
    biases     [N] of out_dtype or None
    return     [M, N] of out_dtype: bfloat16, float16 or float32, rounded once
    As `scaled_matmul` where the device multiplies no fp8 of this kind. No gradients. Raises ValueError for arguments
    that do not fit, RuntimeError where Triton cannot run.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"got activation {activation!r}: there are {', '.join(ACTIVATIONS)}")
    _check_fp8(x, dict(gate=gate), dict(gate_bias=gate_bias), out_dtype)
    _check_fp8(x, dict(up=up), dict(up_bias=up_bias), out_dtype)
    if gate.shape != up.shape:
        raise ValueError(f"got gate {tuple(gate.shape)} and up {tuple(up.shape)}")
    rows, n = x.shape[0], gate.shape[0]
    _check_scales(x_scale=(x_scale, rows), gate_scale=(gate_scale, n), up_scale=(up_scale, n))
    _check_devices(x, gate, up, x_scale, gate_scale, up_scale, gate_bias, up_bias)
    x, gate, up = _multiplied(x, gate, up)
    scales = (x_scale, gate_scale, up_scale)
    return launch.scaled_gated_matmul(x, gate, up, scales, gate_bias, up_bias, activation, out_dtype)


def _check_fp8(
    x: Tensor, weight: dict[str, Tensor], bias: dict[str, Tensor | None], out_dtype: torch.dtype
) -> None:
    """x [M, K], a weight [N, K] and a bias by their names; raises ValueError for what does not fit."""
    ((weight_name, w),), ((bias_name, b),) = weight.items(), bias.items()
    if x.dtype not in FP8 or w.dtype != x.dtype:
        raise ValueError(f"got x {x.dtype} and {weight_name} {w.dtype}: both must be one of {FP8}")
    if out_dtype not in launch.DTYPES:
        raise ValueError(f"got out_dtype {out_dtype}: there are {', '.join(map(str, launch.DTYPES))}")
    if x.dim() != 2:
        raise ValueError(f"got x {tuple(x.shape)}, wanted [M, K]")
    _check_shapes(x, **weight, **bias)
    if b is not None and b.dtype != out_dtype:
        raise ValueError(f"got {bias_name} {b.dtype} for out_dtype {out_dtype}")


def _check_scales(**scales: tuple[Tensor, int]) -> None:
    for name, (scale, count) in scales.items():
        if scale.dtype != torch.float32 or (scale.numel() != 1 and scale.shape != (count, 1)):
            raise ValueError(
                f"got {name} {tuple(scale.shape)} {scale.dtype}, wanted one element or [{count}, 1] of float32"
            )


def _check_devices(x: Tensor, *others: Tensor | None) -> None:
    if any(t is not None and t.device != x.device for t in others):
        raise ValueError(f"got tensors on other devices than x's {x.device}")
    launch.require_triton(x.device)


def _multiplied(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """fp8 operands as this device multiplies them."""
    if multiplies(x.dtype, x.device):
        return (x, *weights)
    said = f"{x.device} multiplies no {x.dtype}: widened to bfloat16, which is as exact and half as fast"
    warnings.warn(said, stacklevel=3)
    return tuple(t.to(torch.bfloat16) for t in (x, *weights))


def quantize_rows(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x [M, K] as fp8 and the scale of each row, [M, 1] fp32: the row's largest magnitude becomes the largest fp8.

    return   (fp8 [M, K], scale) with fp8 * scale near x: within 2^-4 of an entry, or of 2^-9 of a scale if it is small
    A row of zeros has the scale 1; one with NaN or an infinity becomes NaN.
    """
    if dtype not in FP8 or x.dim() != 2:
        raise ValueError(f"got x {tuple(x.shape)} and dtype {dtype}: wanted [M, K] and one of {FP8}")
    wide = x.float()
    largest = wide.abs().amax(1, keepdim=True) if x.shape[1] else wide.new_zeros(x.shape[0], 1)
    scale = largest / torch.finfo(dtype).max
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    return (wide / scale).to(dtype), scale


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels multiply this kind of fp8 there: sm_89 and later and the interpreter e4m3fn, gfx94 fnuz."""
    if device.type != "cuda":
        return dtype == torch.float8_e4m3fn
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName
        return dtype == (torch.float8_e4m3fnuz if arch.startswith("gfx94") else torch.float8_e4m3fn)
    return dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(device) >= (8, 9)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        scale: float | None,
        precision: str,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return launch.matmul(x, weight, bias, residual=residual, scale=scale, precision=precision)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dx = _times(matmul(dy, weight), ctx.scale) if wanted[0] else None
        dw = _times(matmul(dy.t(), x), ctx.scale) if wanted[1] else None
        return dx, dw, _columns(dy) if wanted[2] else None, dy if wanted[3] else None, None, None


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate: Tensor,
        up: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: str,
        keep: bool,
        precision: str,
    ) -> Tensor:
        y, g, u = launch.gated_matmul(x, gate, up, gate_bias, up_bias, activation, keep, precision=precision)
        ctx.save_for_backward(x, gate, up, g, u)
        ctx.activation = activation
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, g, u = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dg, du = launch.pointwise.swiglu_backward(dy.contiguous(), g, u, ctx.activation)
        dx = None
        if wanted[0]:
            dx = torch.empty_like(x)
            matmul_into(dx, [dg, du], [gate, up])
        weights = [matmul(d.t(), x) if want else None for d, want in ((dg, wanted[1]), (du, wanted[2]))]
        biases = [_columns(d) if want else None for d, want in ((dg, wanted[3]), (du, wanted[4]))]
        return dx, *weights, *biases, None, None, None


def _rows(x: Tensor) -> Tensor:
    """x [..., K] -> [M, K]; a view where the strides allow one."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _times(x: Tensor, scale: float | None) -> Tensor:
    return x if scale is None else x.mul_(scale)


def _columns(x: Tensor) -> Tensor:
    """The sum of each column, in fp32, rounded once."""
    return x.sum(0, dtype=torch.float32).to(x.dtype)


def _precision(asked: str | None) -> str:
    if asked is None:  # what `allow_tf32` sets as well
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
    if asked not in PRECISIONS:
        raise ValueError(f"got precision {asked!r}: there are {', '.join(PRECISIONS)}")
    return asked


def _check_shapes(x: Tensor, **others: Tensor | None) -> None:
    """A weight [N, K] and a bias [N] fit x [..., K]; raises ValueError that names the one that does not."""
    (weight_name, weight), (bias_name, bias) = others.items()
    assert weight is not None
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"got x {tuple(x.shape)} and {weight_name} {tuple(weight.shape)}, wanted [..., K] and [N, K]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"got {bias_name} {tuple(bias.shape)} for {weight_name} {tuple(weight.shape)}")
