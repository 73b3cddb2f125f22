"""Launchers of the matmuls without communication: plain, gated, with K split for few rows.

What the fused kernels add their communication to, and what an MLP on one device may run. A plan is one launch, or with
split K the launches of the parts and of their sum, to be started in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import tuned
from .config import VECTOR, Config, Machine, machine_of
from .operands import local_config, operands, with_tile, within_reach
from .run import DTYPES, Launch, check_tensors

JOINED = 1024  # elements of a program that joins parts


@dataclass(frozen=True)
class Epilogue:
    """What is done to x @ w.T in fp32: y = scale * x_scale * w_scale * product + bias + residual.

    bias             [N]
    residual         [M, N], any strides
    scale            a number
    x_scale, w_scale   fp32, [M, 1] and [N, 1], or one element each
    """

    bias: Tensor | None = None
    residual: Tensor | None = None
    scale: float | None = None
    x_scale: Tensor | None = None
    w_scale: Tensor | None = None

    def args(self) -> dict[str, Any]:
        """As the kernels take it."""
        strides = (0, 0) if self.residual is None else self.residual.stride()
        return dict(
            bias=_contiguous(self.bias),
            scale=self.scale,
            x_scale=_contiguous(self.x_scale),
            stride_xs=_step(self.x_scale),
            w_scale=_contiguous(self.w_scale),
            stride_ws=_step(self.w_scale),
            residual=self.residual,
            stride_rm=strides[0],
            stride_rn=strides[1],
        )


NOTHING = Epilogue()
Scales = tuple[Tensor | None, Tensor | None, Tensor | None]  # of x, gate and up, as an Epilogue has them


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    config: Config | None = None,
    *,
    residual: Tensor | None = None,
    scale: float | None = None,
    precision: str = "ieee",
) -> Tensor:
    """y = scale * x @ w.T + bias + residual on one device, see kernels/matmul.py.

    x          [M, K]   any strides
    weight     [N, K]   any strides
    bias       [N] or None
    residual   [M, N] or None, any strides
    precision  of fp32 operands: "ieee" or "tf32"
    return     [M, N]
    """
    check_tensors(x, [weight, bias, residual])
    epilogue = Epilogue(bias, residual, scale)
    return _run(plan_linear(x, weight, epilogue, x.dtype, config, precision, machine_of(x.device)), x)


def scaled_matmul(
    x: Tensor,
    weight: Tensor,
    epilogue: Epilogue,
    dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """y [M, N] of `dtype` from fp8 x [M, K] and weight [N, K] (or 16-bit ones), which the caller has checked."""
    return _run(plan_linear(x, weight, epilogue, dtype, config, "ieee", machine_of(x.device)), x)


def gated_matmul(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    act: str = "silu",
    keep: bool = False,
    config: Config | None = None,
    *,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y = act(x @ gate.T + gate_bias) * (x @ up.T + up_bias), see kernels/gated_matmul.py.

    x          [M, K]   any strides, as gate and up [N, K] may have
    act        "silu", "gelu" or "gelu_pytorch_tanh"
    keep       return the two factors too, before the activation
    return     y, gate's product, up's product, each [M, N]; the last two None without `keep`
    """
    check_tensors(x, [gate, up, gate_bias, up_bias])
    machine = machine_of(x.device)
    return _run(plan_gated(x, gate, up, gate_bias, up_bias, act, keep, config, precision, machine), x)


def scaled_gated_matmul(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    scales: Scales,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    act: str,
    dtype: torch.dtype,
    config: Config | None = None,
) -> Tensor:
    """y [M, N] of `dtype` from fp8 x [M, K], gate and up [N, K] (or 16-bit ones), which the caller has checked."""
    machine = machine_of(x.device)
    launches, (y, _, _) = plan_gated(
        x, gate, up, gate_bias, up_bias, act, False, config, "ieee", machine, scales=scales, dtype=dtype
    )
    for launch in launches:
        launch.start(x.device)
    return y


Plan = tuple[list[Launch], Tensor]
Outputs = TypeVar("Outputs")


def _run(plan: tuple[list[Launch], Outputs], x: Tensor) -> Outputs:
    launches, outputs = plan
    for launch in launches:
        launch.start(x.device)
    return outputs


def plan_linear(
    x: Tensor,
    weight: Tensor,
    epilogue: Epilogue,
    dtype: torch.dtype,
    config: Config | None,
    precision: str,
    machine: Machine,
) -> Plan:
    """The launches of a matmul, not yet run, and its output."""
    from fusedtp.kernels.matmul import matmul_kernel

    (m, k), n = x.shape, weight.shape[0]
    if config is None:
        config = local_config(machine, x.dtype, precision, m, n, k)
        if precision == "ieee" and x.dtype in DTYPES:  # what the table of this GPU has entries for
            found = tuned.lookup("matmul", machine, x.dtype, rows=m, cols=n, k=k, even=n % VECTOR == 0)
            config = with_tile(config, found, machine, m, n, k)
    config = within_reach(config, precision, [x, weight])
    y = x.new_empty(m, n, dtype=dtype)
    if config.splits > 1 and y.numel():
        part, parts = plan_parts(x, weight, config, precision, machine)
        return [part, plan_join(parts, None, epilogue, None, y, None, None, "silu", config)], y
    matrices = dict(x=(x, "m", config.block_m), w=(weight, "n", config.block_n))
    args = operands(config, precision, matrices) | epilogue.args()
    args |= dict(y=y, M=m, N=n, HALVES=config.halves)
    return [Launch(matmul_kernel, _programs(machine, config, m, n), args, config)], y


def plan_gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    act: str,
    keep: bool,
    config: Config | None,
    precision: str,
    machine: Machine,
    *,
    scales: Scales = (None, None, None),
    dtype: torch.dtype | None = None,
) -> tuple[list[Launch], tuple[Tensor, Tensor | None, Tensor | None]]:
    """The launches of a gated matmul, not yet run, and its outputs of `dtype`, or x's."""
    from fusedtp.kernels.gated_matmul import gated_matmul_kernel

    (m, k), n = x.shape, gate.shape[0]
    config = config or local_config(machine, x.dtype, precision, m, n, k, 2, keep)
    config = within_reach(config, precision, [x, gate, up])
    y = x.new_empty(m, n, dtype=dtype)
    gate_out, up_out = (torch.empty_like(y), torch.empty_like(y)) if keep else (None, None)
    x_scale, gate_scale, up_scale = scales
    outs = (y, gate_out, up_out)
    if config.splits > 1 and y.numel():
        first, parts = plan_parts(x, gate, config, precision, machine)
        second, up_parts = plan_parts(x, up, config, precision, machine)
        epilogue = Epilogue(gate_bias, x_scale=x_scale, w_scale=gate_scale)
        join = plan_join(parts, up_parts, epilogue, up_bias, *outs, act, config, up_scale)
        return [first, second, join], outs
    matrices = dict(
        x=(x, "m", config.block_m), gate=(gate, "n", config.block_n), up=(up, "n", config.block_n)
    )
    args = operands(config, precision, matrices) | dict(
        gate_bias=_contiguous(gate_bias),
        up_bias=_contiguous(up_bias),
        y=y,
        gate_out=gate_out,
        up_out=up_out,
        M=m,
        N=n,
        ACT=act,
        x_scale=_contiguous(x_scale),
        stride_xs=_step(x_scale),
        gate_scale=_contiguous(gate_scale),
        stride_gs=_step(gate_scale),
        up_scale=_contiguous(up_scale),
        stride_us=_step(up_scale),
    )
    return [Launch(gated_matmul_kernel, _programs(machine, config, m, n), args, config)], outs


def plan_parts(
    x: Tensor, weight: Tensor, config: Config, precision: str, machine: Machine
) -> tuple[Launch, Tensor]:
    """The launch that sums parts of K, and the parts [splits, M, N]."""
    from fusedtp.kernels.split_k import split_matmul_kernel

    (m, k), n = x.shape, weight.shape[0]
    blocks = -(-k // config.block_k)
    each = -(-blocks // config.splits)
    parts = x.new_empty(max(1, -(-blocks // max(1, each))), m, n, dtype=torch.float32)
    matrices = dict(x=(x, "m", config.block_m), w=(weight, "n", config.block_n))
    args = operands(config, precision, matrices) | dict(
        parts=parts, M=m, N=n, k_each=each * config.block_k, splits=len(parts)
    )
    return Launch(split_matmul_kernel, _programs(machine, config, m, n, len(parts)), args, config), parts


def plan_join(
    parts: Tensor,
    up_parts: Tensor | None,
    epilogue: Epilogue,
    up_bias: Tensor | None,
    y: Tensor,
    gate_out: Tensor | None,
    up_out: Tensor | None,
    act: str,
    config: Config,
    up_scale: Tensor | None = None,
) -> Launch:
    """The launch that sums the parts in order and ends as the whole matmul would have."""
    from fusedtp.kernels.split_k import join_parts_kernel

    splits, m, n = parts.shape
    rows = max(1, min(JOINED // config.block_n, 1 << (m - 1).bit_length()))
    cols = config.block_n
    args = epilogue.args() | dict(
        parts=parts,
        up_parts=up_parts,
        splits=splits,
        up_bias=_contiguous(up_bias),
        y=y,
        gate_out=gate_out,
        up_out=up_out,
        M=m,
        N=n,
        up_scale=_contiguous(up_scale),
        stride_us=_step(up_scale),
        ROWS=rows,
        COLS=cols,
        ACT=act,
    )
    return Launch(join_parts_kernel, -(-m // rows) * -(-n // cols), args, Config(0, 0, 0))


def _programs(machine: Machine, config: Config, m: int, n: int, parts: int = 1) -> int:
    return min(machine.programs, -(-m // config.block_m) * -(-n // config.block_n) * parts)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _step(scale: Tensor | None) -> int:
    """From one row's scale to the next one's."""
    return int(scale is not None and scale.numel() > 1)
