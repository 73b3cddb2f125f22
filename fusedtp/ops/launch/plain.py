"""Launchers of the single-device matmul, the base of the fused kernels.

Benchmarks compare the fused kernels with it. A single-device layer uses the vendor's matmul instead. On CPU tensors it
runs only under Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.launching import Launch

from . import tuned
from .config import VECTOR, Config, Machine, machine_of
from .operands import (
    FP8,
    describable,
    described,
    fits,
    local_config,
    of_vectors,
    operands,
    with_tile,
    within_reach,
)
from .run import DTYPES, check_tensors, require_triton

Scales = tuple[Tensor | None, Tensor | None]  # of x's and w's rows: fp32, [M, 1] and [N, 1], or one element each


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    config: Config | None = None,
    *,
    precision: str = "ieee",
) -> Tensor:
    """y = x @ w.T + bias on one device, summed in fp32 and rounded once, see kernels/matmul.py.

    x          [M, K]   fp32, fp16 or bf16, any strides
    weight     [N, K]   any strides
    bias       [N] or None
    precision  for fp32 operands: "ieee" or "tf32"
    return     [M, N]
    """
    check_tensors(x, [weight, bias])
    launch, y = plan_matmul(x, weight, bias, x.dtype, config, precision, machine_of(x.device))
    launch.start(x.device)
    return y


def scaled_matmul(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    w_scale: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    config: Config | None = None,
) -> Tensor:
    """y = x_scale * w_scale * (x @ w.T) + bias of fp8 operands, summed in fp32 and rounded once.

    x        [M, K]   float8_e4m3fn or, for a gradient, float8_e5m2 (on MI300 float8_e4m3fnuz)
    weight   [N, K]   likewise
    x_scale  [M, 1], one per row, or one element; fp32, as w_scale
    w_scale  [N, 1], or one element
    bias     [N] in `dtype`, or None
    return   [M, N] in `dtype`: bfloat16, float16 or float32
    Raises ValueError for a dtype, a shape or a device that does not fit, RuntimeError if Triton cannot run.
    """
    _check_fp8(x, weight, x_scale, w_scale, bias, dtype)
    machine, scales = machine_of(x.device), (x_scale, w_scale)
    launch, y = plan_matmul(x, weight, bias, dtype, config, "ieee", machine, scales)
    launch.start(x.device)
    return y


def plan_matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    config: Config | None,
    precision: str,
    machine: Machine,
    scales: Scales = (None, None),
) -> tuple[Launch, Tensor]:
    """The launch of a matmul, not yet run, and its output [M, N] in `dtype`."""
    from fusedtp.kernels.matmul import matmul_kernel

    m, n = x.shape[0], weight.shape[0]
    chosen = config is None
    if config is None:
        config = local_config(machine, x.dtype, precision, m, n)
        if precision == "ieee" and x.dtype in DTYPES:  # the tuned tables have entries for these only
            even = n % VECTOR == 0
            found = tuned.lookup("matmul", machine, x.dtype, rows=m, cols=n, k=x.shape[1], even=even)
            config = with_tile(config, found)
    config = within_reach(config, precision, [x, weight])
    if chosen and not config.tma:
        config = of_vectors(config, machine, x, weight)
    y = x.new_empty(m, n, dtype=dtype)
    flat = config.tma and not config.specialized and describable(y) and fits(config, x, y, machine)
    x_scale, w_scale = scales
    args: dict[str, Any] = operands(config, precision, x, weight) | dict(
        bias=contiguous(bias),
        y=described(y, [config.block_m, config.block_n >> config.halves]) if flat else y,
        M=m,
        N=n,
        x_scale=x_scale,
        stride_xs=scale_step(x_scale),
        w_scale=w_scale,
        stride_ws=scale_step(w_scale),
        HALVES=config.halves,
        FLAT=flat,
    )
    programs = min(machine.programs, -(-m // config.block_m) * -(-n // config.block_n))
    return Launch(matmul_kernel, programs, args, config), y


def multiplies(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels multiply this fp8 dtype on `device`: e4m3fn and e5m2 on sm_89 and later and in the
    interpreter, fnuz on gfx94.
    """
    common = (torch.float8_e4m3fn, torch.float8_e5m2)
    if device.type != "cuda":
        return dtype in common
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(device).gcnArchName
        return dtype == torch.float8_e4m3fnuz if arch.startswith("gfx94") else dtype in common
    return dtype in common and torch.cuda.get_device_capability(device) >= (8, 9)


def _check_fp8(
    x: Tensor, weight: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> None:
    if x.dtype not in FP8 or weight.dtype not in FP8:
        raise ValueError(f"got x {x.dtype} and weight {weight.dtype}: both must be one of {FP8}")
    if dtype not in DTYPES:
        raise ValueError(f"got dtype {dtype} for the result: it must be one of {', '.join(map(str, DTYPES))}")
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"got x {tuple(x.shape)} and weight {tuple(weight.shape)}, wanted [M, K] and [N, K]")
    for name, scale, count in (("x_scale", x_scale, len(x)), ("w_scale", w_scale, len(weight))):
        if scale.dtype != torch.float32 or (scale.numel() != 1 and scale.shape != (count, 1)):
            raise ValueError(
                f"got {name} {tuple(scale.shape)} {scale.dtype}, wanted one element or [{count}, 1] of float32"
            )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != dtype):
        raise ValueError(f"got bias {tuple(bias.shape)} {bias.dtype}, wanted {tuple(weight.shape[:1])} of {dtype}")
    if any(t is not None and t.device != x.device for t in (weight, x_scale, w_scale, bias)):
        raise ValueError(f"got tensors on several devices: all must be on x's device, {x.device}")
    require_triton(x.device)
    for each in (x, weight):
        if not multiplies(each.dtype, x.device):
            raise ValueError(f"{x.device} cannot multiply {each.dtype}: convert it to bfloat16")


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def scale_step(scale: Tensor | None) -> int:
    """The stride from one row's scale to the next."""
    return scale.stride(0) if scale is not None and scale.numel() > 1 else 0
