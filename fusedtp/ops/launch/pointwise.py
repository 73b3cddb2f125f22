"""Launchers of the elementwise kernels. Every tensor's last dim is contiguous; sizes may be zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .config import machine_of
from .run import _on as started_on

MAX_WIDTH = 16384  # of a row that one program holds
ELEMENTS = 2048  # of a program that is free to choose


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H] (+ residual) -> y [T, H], h = x + residual (x itself without one), 1 / rms fp32 [T]."""
    from fusedtp.kernels.rms_norm import rms_norm_kernel

    rows, width = x.shape
    block, height, warps = _row_blocks(width)
    y = x.new_empty(rows, width)
    total = None if residual is None else x.new_empty(rows, width)
    inverse_rms = x.new_empty(rows, dtype=torch.float32)
    if y.numel():
        with started_on(x.device):
            rms_norm_kernel[(-(-rows // height),)](
                x, x.stride(0), residual, 0 if residual is None else residual.stride(0), weight, y, total,
                inverse_rms, rows, width, eps, ROWS=height, BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return y, x if total is None else total, inverse_rms


def rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, h: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    """-> the gradient of x (and of the residual) [T, H], of weight [H] in fp32. Bitwise repeatable on one machine."""
    from fusedtp.kernels.rms_norm import rms_norm_backward_kernel

    rows, width = h.shape
    block, height, warps = _row_blocks(width)
    programs = max(1, min(2 * machine_of(h.device).programs, -(-rows // height)))
    dx, parts = h.new_empty(rows, width), h.new_empty(programs, width, dtype=torch.float32)
    if width:
        with started_on(h.device):
            rms_norm_backward_kernel[(programs,)](
                dy, dy.stride(0), dtotal, 0 if dtotal is None else dtotal.stride(0), h, h.stride(0), weight,
                inverse_rms, dx, parts, rows, width, ROWS=height, BLOCK=block, num_warps=warps,
            )  # fmt: skip
    return dx, parts.sum(0)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up; both contiguous, of one shape."""
    from fusedtp.kernels.swiglu import swiglu_kernel

    y = torch.empty_like(gate)
    _elementwise(swiglu_kernel, gate, up, y)
    return y


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """-> the gradients of gate and up. All contiguous."""
    from fusedtp.kernels.swiglu import swiglu_backward_kernel

    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    _elementwise(swiglu_backward_kernel, dy, gate, up, dgate, dup)
    return dgate, dup


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """q [B, S, Hq, D], k [B, S, Hk, D], tables fp32 [B or 1, S, 1, D/2] -> both rotated, contiguous."""
    from fusedtp.kernels.rope import rope_kernel

    batch, length, _, size = q.shape
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    if batch * length:
        half = size // 2
        pad = _power_of_two(half)
        with started_on(q.device):
            rope_kernel[(batch * length,)](
                q, q.stride()[:3], q_out, q.shape[2], k, k.stride()[:3], k_out, k.shape[2], cos, sin, length,
                length * half if cos.shape[0] > 1 else 0, SIGN=sign, HALF=half, PAD=pad,
                HEADS=min(_power_of_two(max(q.shape[2], k.shape[2])), max(1, ELEMENTS // pad)), num_warps=4,
            )  # fmt: skip
    return q_out, k_out


def _elementwise(kernel: Any, *tensors: Tensor) -> None:
    count = tensors[0].numel()
    if count:
        with started_on(tensors[0].device):
            kernel[(-(-count // ELEMENTS),)](*tensors, count, BLOCK=ELEMENTS, num_warps=4)


def _row_blocks(width: int) -> tuple[int, int, int]:
    """(columns, rows, warps) of a program: whole rows, 16 elements a thread as long as a program may have so many."""
    block = _power_of_two(width)
    height = max(1, ELEMENTS // block)
    return block, height, max(1, min(16, block * height // 512))


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
