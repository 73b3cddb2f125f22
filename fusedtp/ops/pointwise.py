"""RMSNorm, SwiGLU, GeGLU and rotary embedding with Triton kernels and autograd: for GPUs, in eager mode.

Modules use these if `serves` is true, else torch's own operations, which Inductor fuses by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.device_view import runs_kernels

from . import launch
from .first_order import first_order

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


def serves(*tensors: Tensor) -> bool:
    """Whether the kernels support these: fp32, fp16 or bf16 on one GPU supported by Triton, in eager mode."""
    first = tensors[0]
    return (
        first.device.type == "cuda"
        and not torch.compiler.is_compiling()
        and all(x.dtype in DTYPES and x.device == first.device for x in tensors)
        and runs_kernels(first.device)
    )


def _rows(x: Tensor) -> Tensor:
    """x [..., H] -> [T, H] with contiguous rows: x itself, a view, or a copy if the strides allow none."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _shaped(rows: Tensor, x: Tensor) -> Tensor:
    """rows [T, H] -> [..., H], the shape of x."""
    return rows if x.dim() == 2 else rows.view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim, in fp32, rounded once.

    x        [..., H]
    weight   [H]        may have another dtype than x
    return   [..., H]   in x's dtype
    Raises ValueError if the weight has another length. Source: Zhang and Sennrich 2019.
    """
    y, _ = _RMSNorm.apply(_rows(x), None, weight, eps)
    return _shaped(y, x)


def rms_norm_and_input(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x), x): if x is used besides its norm, one kernel computes the gradient of both uses.

    x        [..., H]   weight as in rms_norm
    return   two tensors with x's shape and dtype; the second is x as another autograd node, not to be changed in place
    Raises ValueError if the weight has another length.
    """
    rows = _rows(x)
    y, same = _RMSNorm.apply(rows, None, weight, eps, True)
    return _shaped(y, x), _shaped(same, x)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(h), h) with h = x + residual, rounded to their common dtype like torch's sum.

    x, residual   [..., H]   weight as in rms_norm
    return        two tensors with x's shape and dtype
    Raises ValueError if x and residual differ in shape or dtype.
    """
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"got x {tuple(x.shape)} {x.dtype} and a residual {tuple(residual.shape)} {residual.dtype}: they must match"
        )
    y, total = _RMSNorm.apply(_rows(x), _rows(residual), weight, eps)
    return _shaped(y, x), _shaped(total, x)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, returns_input: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        if weight.shape != x.shape[-1:]:
            raise ValueError(f"got a weight {tuple(weight.shape)}, wanted [{x.shape[-1]}]")
        ctx.set_materialize_grads(False)
        y, h, inverse_rms = launch.pointwise.rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(h, weight, inverse_rms)
        ctx.added = residual is not None
        return y, h if ctx.added or returns_input else None

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Tensor | None, ...]:
        h, weight, inverse_rms = ctx.saved_tensors
        if dy is None:
            return dtotal, dtotal if ctx.added else None, None, None, None
        dtotal = None if dtotal is None else _rows(dtotal)
        dx, dweight = launch.pointwise.rms_norm_backward(_rows(dy), dtotal, h, weight, inverse_rms)
        return dx, dx if ctx.added else None, dweight.to(weight.dtype), None, None


def gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) * up, elementwise, in fp32, rounded once. Saves only its two inputs.

    gate, up   any shape, the same; return the same
    act        one of ACTIVATIONS, as transformers calls them
    Raises ValueError if they differ in shape or dtype, or for an unknown act. Source: Shazeer 2020.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"got gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype}: they must match"
        )
    if act not in ACTIVATIONS:
        raise ValueError(f"the kernels have {', '.join(ACTIVATIONS)}, not {act!r}")
    y: Tensor = _Gated.apply(gate.contiguous(), up.contiguous(), act)
    return y


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return launch.pointwise.swiglu(gate, up, act)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        dgate, dup = launch.pointwise.swiglu_backward(dy.contiguous(), gate, up, ctx.act)
        return dgate, dup, None


def rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [B, S, Hq, D] and k [B, S, Hk, D] rotated by fp32 tables [B or 1, S, 1, D/2], half-split; one launch.

    return   both rotated, contiguous, in their own dtype
    Raises ValueError for shapes or dtypes that do not fit. Source: Su et al. 2021, "RoFormer".
    """
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.dtype != k.dtype:
        raise ValueError(f"got q {tuple(q.shape)} {q.dtype} and k {tuple(k.shape)} {k.dtype}")
    wanted = (q.shape[1], 1, q.shape[3] // 2)
    if cos.shape != sin.shape or cos.shape[1:] != wanted or cos.shape[0] not in (1, q.shape[0]):
        raise ValueError(f"got tables {tuple(cos.shape)}, {tuple(sin.shape)} for q {tuple(q.shape)}")
    return _Rotate.apply(q, k, cos.contiguous(), sin.contiguous())


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return launch.pointwise.rotate(_unit(q), _unit(k), cos, sin, 1)

    @staticmethod
    @first_order
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return *launch.pointwise.rotate(_unit(dq), _unit(dk), cos, sin, -1), None, None


def _unit(x: Tensor) -> Tensor:
    """x with its last dim contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
