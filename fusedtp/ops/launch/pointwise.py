"""Launchers of the elementwise kernels. Every tensor's last dim is contiguous; sizes may be zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.launching import Launch

from .config import VECTOR, Config, Machine, machine_of, power_of_two

WHOLE = 8192  # width of a row that one program holds in registers, with its weight's gradient
WIDE_WARPS = 16  # of a program for a part of a wider one
PROGRAMS = 2  # that walk over rows on a multiprocessor
STAGES = 3  # of their loops, where rows can be copied asynchronously and shared memory has room
ELEMENTS = 2048  # of a program that is free to choose


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H] (+ residual) -> y [T, H], h = x + residual (x itself without one), 1 / rms fp32 [T]."""
    launch, outs = plan_rms_norm(x, residual, weight, eps, machine_of(x.device))
    launch.start(x.device)
    return outs


def plan_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, machine: Machine
) -> tuple[Launch, tuple[Tensor, Tensor, Tensor]]:
    """The launch of rms_norm, not yet run, and its outputs."""
    from fusedtp.kernels.rms_norm import rms_norm_kernel
    from fusedtp.kernels.rms_norm_wide import rms_norm_wide_kernel

    rows, width = x.shape
    y, inverse_rms = x.new_empty(rows, width), x.new_empty(rows, dtype=torch.float32)
    total = None if residual is None else x.new_empty(rows, width)
    stride_r = 0 if residual is None else residual.stride(0)
    args = dict(
        x=x,
        stride_x=x.stride(0),
        residual=residual,
        stride_r=stride_r,
        weight=weight,
        y=y,
        total=total,
        inverse_rms=inverse_rms,
        T=rows,
        H=width,
        eps=eps,
    )
    outs = y, x if total is None else total, inverse_rms
    if width > WHOLE:
        args |= dict(BLOCK=_wide_block(width, x.stride(0), stride_r))
        return _launch(rms_norm_wide_kernel, rows, args, WIDE_WARPS, machine), outs
    block, height, warps = _row_blocks(width)
    args |= dict(ROWS=height, BLOCK=block)
    return _launch(rms_norm_kernel, -(-rows // height) if width else 0, args, warps, machine), outs


def rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, h: Tensor, weight: Tensor, inverse_rms: Tensor
) -> tuple[Tensor, Tensor]:
    """-> the gradient of x (and of the residual) [T, H], of weight [H] in fp32. Bitwise repeatable on one machine."""
    launch, (dx, parts) = plan_rms_norm_backward(dy, dtotal, h, weight, inverse_rms, machine_of(h.device))
    launch.start(h.device)
    return dx, parts.sum(0)


def plan_rms_norm_backward(
    dy: Tensor, dtotal: Tensor | None, h: Tensor, weight: Tensor, inverse_rms: Tensor, machine: Machine
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The launch of rms_norm_backward, not yet run; dx, and each program's part of dweight [programs, H]."""
    from fusedtp.kernels.rms_norm import rms_norm_backward_kernel
    from fusedtp.kernels.rms_norm_wide import rms_norm_wide_backward_kernel

    rows, width = h.shape
    stride_dt = 0 if dtotal is None else dtotal.stride(0)
    block, height, warps = _row_blocks(width)
    columns = 1  # programs of a row
    if width > WHOLE:
        block = _wide_block(width, dy.stride(0), stride_dt, h.stride(0))
        columns, height, warps = -(-width // block), 1, WIDE_WARPS
    programs = max(1, min(PROGRAMS * machine.programs // columns, -(-rows // height)))
    dx, parts = h.new_empty(rows, width), h.new_empty(programs, width, dtype=torch.float32)
    args = dict(
        dy=dy,
        stride_dy=dy.stride(0),
        dtotal=dtotal,
        stride_dt=stride_dt,
        h=h,
        stride_h=h.stride(0),
        weight=weight,
        inverse_rms=inverse_rms,
        dx=dx,
        dweight=parts,
        T=rows,
        H=width,
        BLOCK=block,
    )
    outs = dx, parts
    if width > WHOLE:
        args |= dict(COLUMNS=columns)
        return _launch(rms_norm_wide_backward_kernel, programs * columns, args, warps, machine), outs
    ahead = (2 if dtotal is None else 3) * (STAGES - 1) * block * height * h.element_size()
    even = all(n % VECTOR == 0 for n in (width, dy.stride(0), stride_dt, h.stride(0)))
    stages = STAGES if even and PROGRAMS * ahead <= machine.shared_bytes else 1
    args |= dict(ROWS=height, STAGES=stages)
    side = max(1, min(PROGRAMS, 16 // warps))  # more warps have too few registers each
    return _launch(rms_norm_backward_kernel, programs if width else 0, args, warps, machine, side), outs


def swiglu(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """act(gate) * up; both contiguous, of one shape. act: "silu", "gelu" or "gelu_pytorch_tanh"."""
    launch, y = plan_swiglu(gate, up, act)
    launch.start(gate.device)
    return y


def plan_swiglu(gate: Tensor, up: Tensor, act: str) -> tuple[Launch, Tensor]:
    """The launch of swiglu, not yet run, and its output."""
    from fusedtp.kernels.swiglu import swiglu_kernel

    y = torch.empty_like(gate)
    return _elementwise(swiglu_kernel, dict(gate=gate, up=up, y=y), gate.numel(), act), y


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """-> the gradients of gate and up. All contiguous."""
    launch, grads = plan_swiglu_backward(dy, gate, up, act)
    launch.start(gate.device)
    return grads


def plan_swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The launch of swiglu_backward, not yet run, and its outputs."""
    from fusedtp.kernels.swiglu import swiglu_backward_kernel

    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    args = dict(dy=dy, gate=gate, up=up, dgate=dgate, dup=dup)
    return _elementwise(swiglu_backward_kernel, args, gate.numel(), act), (dgate, dup)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """q [B, S, Hq, D], k [B, S, Hk, D], tables fp32 [B or 1, S, 1, D/2] -> both rotated, contiguous."""
    launch, outs = plan_rotate(q, k, cos, sin, sign)
    launch.start(q.device)
    return outs


def plan_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, sign: int) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The launch of rotate, not yet run, and its outputs."""
    from fusedtp.kernels.rope import rope_kernel

    batch, length, _, size = q.shape
    half = size // 2
    pad = power_of_two(half)
    heads = power_of_two(max(q.shape[2], k.shape[2]))
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    args = dict(
        q=q,
        q_strides=q.stride()[:3],
        q_out=q_out,
        heads_q=q.shape[2],
        k=k,
        k_strides=k.stride()[:3],
        k_out=k_out,
        heads_k=k.shape[2],
        cos=cos,
        sin=sin,
        S=length,
        stride_cos=length * half if cos.shape[0] > 1 else 0,
        SIGN=sign,
        HALF=half,
        PAD=pad,
        HEADS=min(heads, max(1, ELEMENTS // pad)),
    )
    return _launch(rope_kernel, batch * length, args), (q_out, k_out)


def _launch(
    kernel: Any,
    programs: int,
    args: dict[str, Any],
    warps: int = 4,
    machine: Machine | None = None,
    side: int = 1,
) -> Launch:
    """On a `machine` that is CUDA's, a thread gets all the registers there are for `side` programs side by side."""
    limited = machine is not None and machine.clock == "cuda"
    registers = min(255, 65536 // (32 * warps * side)) if limited else 0
    return Launch(kernel, programs, args, Config(0, 0, 0, num_warps=warps, max_registers=registers))


def _elementwise(kernel: Any, tensors: dict[str, Tensor], count: int, act: str) -> Launch:
    return _launch(kernel, -(-count // ELEMENTS), dict(**tensors, N=count, BLOCK=ELEMENTS, ACT=act))


def _row_blocks(width: int) -> tuple[int, int, int]:
    """(columns, rows, warps) of a program: whole rows, 16 elements a thread as long as a program may have so many."""
    block = power_of_two(width)
    height = max(1, ELEMENTS // block)
    return block, height, max(1, min(16, block * height // 512))


def _wide_block(width: int, *strides: int) -> int:
    """The fewest parts of at most WHOLE columns, and those about equal: 8193 columns would be 8192 and 1.

    Half of that where a thread loads element by element: it then holds an address for each, and they spill.
    """
    most = WHOLE if all(n % VECTOR == 0 for n in (width, *strides)) else WHOLE // 2
    parts = -(-width // most)
    return power_of_two(-(-width // parts))
