"""Launchers of the matmuls of ragged groups, see kernels/grouped_matmul.py and kernels/grouped_wgrad.py.

offsets [E + 1] lies on the device and is not looked at here: what is launched depends on shapes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .config import Config, Machine, machine_of
from .operands import by_pointers, even_columns, local_config
from .pointwise import ELEMENTS
from .run import Launch, check_tensors

LARGE_TILE = 128  # rows; where experts have fewer, a tile has as few


def grouped_matmul(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    offsets: Tensor,
    bias: Tensor | None = None,
    config: Config | None = None,
    *,
    precision: str = "ieee",
) -> Tensor:
    """y = sum_j xs[j] @ weights[j][e].T + bias[e], e the expert of each row; rows from offsets[E] on are not written.

    xs         [R, K]      one or two, any strides
    weights    [E, N, K]   one each, any strides
    bias       [E, N] or None
    precision  of fp32 operands: "ieee" or "tf32"
    return     [R, N]
    """
    check_tensors(xs[0], [*xs[1:], *weights, bias])
    launch, y = plan_matmul(xs, weights, offsets, bias, config, precision, machine_of(xs[0].device))
    launch.start(y.device)
    return y


def grouped_gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    offsets: Tensor,
    act: str = "silu",
    keep: bool = False,
    config: Config | None = None,
    *,
    precision: str = "ieee",
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """y = act(x @ gate[e].T) * (x @ up[e].T), e the expert of each row; rows from offsets[E] on are not written.

    x          [R, K]      any strides, as gate and up [E, N, K] may have
    keep       return the two factors too, before the activation
    return     y, gate's product, up's product, each [R, N]; the last two None without `keep`
    """
    check_tensors(x, [gate, up])
    launch, outs = plan_gated(x, gate, up, offsets, act, keep, config, precision, machine_of(x.device))
    launch.start(x.device)
    return outs


def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    config: Config | None = None,
    *,
    precision: str = "ieee",
) -> Tensor:
    """dw[e] = dy[rows of e].T @ x[rows of e]: dy [R, N], x [R, K], any strides -> [E, N, K] of dtype."""
    check_tensors(x, [dy])
    launch, dw = plan_wgrad(dy, x, offsets, dtype, config, precision, machine_of(x.device))
    launch.start(x.device)
    return dw


def grouped_gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, offsets: Tensor, act: str
) -> tuple[Tensor, Tensor]:
    """-> the gradients of gate and up, all [R, N] and contiguous; rows from offsets[E] on are not written."""
    check_tensors(dy, [gate, up])
    launch, grads = plan_gated_backward(dy, gate, up, offsets, act, machine_of(dy.device))
    launch.start(dy.device)
    return grads


def plan_matmul(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    offsets: Tensor,
    bias: Tensor | None,
    config: Config | None,
    precision: str,
    machine: Machine,
) -> tuple[Launch, Tensor]:
    """The launch of grouped_matmul, not yet run, and its output."""
    from fusedtp.kernels.grouped_matmul import grouped_matmul_kernel

    (r, k), (e, n, _) = xs[0].shape, weights[0].shape
    config = config or group_config(machine, xs[0].dtype, precision, r, e, n)
    y = xs[0].new_empty(r, n)
    assert 1 <= len(xs) == len(weights) <= 2
    (x, *x2), (w, *w2) = of_one_layout(xs), of_one_layout(weights)
    args = _sizes(config, precision, offsets, e, r, n, k) | dict(
        x=x,
        w=w,
        x2=x2[0] if x2 else None,
        w2=w2[0] if w2 else None,
        strides=(*x.stride(), *w.stride()),
        bias=None if bias is None else bias.contiguous(),
        y=y,
        EVEN_K=k % config.block_k == 0,
        HALVES=config.halves,
    )
    return Launch(grouped_matmul_kernel, _programs(machine, config, r, e, n), args, config), y


def plan_gated(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    offsets: Tensor,
    act: str,
    keep: bool,
    config: Config | None,
    precision: str,
    machine: Machine,
) -> tuple[Launch, tuple[Tensor, Tensor | None, Tensor | None]]:
    """The launch of grouped_gated, not yet run, and its outputs."""
    from fusedtp.kernels.grouped_matmul import grouped_gated_kernel

    (r, k), (e, n, _) = x.shape, gate.shape
    config = config or group_config(machine, x.dtype, precision, r, e, n, 2, keep)
    gate, up = of_one_layout([gate, up])
    y = x.new_empty(r, n)
    gate_out, up_out = (x.new_empty(r, n), x.new_empty(r, n)) if keep else (None, None)
    args = _sizes(config, precision, offsets, e, r, n, k) | dict(
        x=x,
        gate=gate,
        up=up,
        strides=(*x.stride(), *gate.stride()),
        y=y,
        gate_out=gate_out,
        up_out=up_out,
        EVEN_K=k % config.block_k == 0,
        ACT=act,
    )
    launch = Launch(grouped_gated_kernel, _programs(machine, config, r, e, n), args, config)
    return launch, (y, gate_out, up_out)


def plan_wgrad(
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    config: Config | None,
    precision: str,
    machine: Machine,
) -> tuple[Launch, Tensor]:
    """The launch of grouped_wgrad, not yet run, and its output."""
    from fusedtp.kernels.grouped_wgrad import grouped_wgrad_kernel

    width, depth = dy.shape[1], x.shape[1]
    if machine.clock != "host":
        dy, x = even_columns(dy), even_columns(x)
    (r, n), k, e = dy.shape, x.shape[1], offsets.shape[0] - 1
    wide = dtype.itemsize > x.dtype.itemsize and machine.capability // 10 == 10
    config = config or group_config(machine, x.dtype, precision, e * n, e, k, keep=wide)
    dw = x.new_empty(e, n, k, dtype=dtype)
    args = _sizes(config, precision, offsets, e, r, n, k) | dict(dy=dy, x=x, dw=dw)
    args["HALVES"] = config.halves
    args["stride_dm"], args["stride_dn"] = dy.stride()
    args["stride_xm"], args["stride_xk"] = x.stride()
    tiles = e * -(-n // config.block_m) * -(-k // config.block_n)
    return Launch(grouped_wgrad_kernel, min(machine.programs, tiles), args, config), dw[:, :width, :depth]


def plan_gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, offsets: Tensor, act: str, machine: Machine
) -> tuple[Launch, tuple[Tensor, Tensor]]:
    """The launch of grouped_gated_backward, not yet run, and its outputs."""
    from fusedtp.kernels.grouped_wgrad import grouped_gated_backward_kernel

    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    args = dict(
        dy=dy, gate=gate, up=up, dgate=dgate, dup=dup, offsets=offsets.contiguous(), E=offsets.shape[0] - 1,
        R=dy.shape[0], N=dy.shape[1], BLOCK=ELEMENTS, ACT=act,
    )  # fmt: skip
    most = 8 * machine.programs  # of few registers, so several share a processor
    programs = min(most, -(-dy.numel() // ELEMENTS))
    return Launch(grouped_gated_backward_kernel, programs, args, Config(0, 0, 0)), (dgate, dup)


def group_config(
    machine: Machine,
    dtype: torch.dtype,
    precision: str,
    rows: int,
    groups: int,
    n: int,
    weights: int = 1,
    keep: bool = False,
) -> Config:
    """Tiles of `groups` matmuls with `rows` rows in all, by pointers: as of one matmul of them all, but no taller than
    what a group has on average. keep: more is stored than one result of the operands' dtype.

    Less deep are those that would spill, by what the lint shows: of two weights in tf32 on sm_80.
    """
    each = -(-rows // max(1, groups))
    tall = min(rows, each) if each < LARGE_TILE else rows
    config = by_pointers(local_config(machine, dtype, precision, tall, n, weights, keep))
    deep = weights > 1 and precision == "tf32" and 0 < machine.capability < 90
    return replace(config, block_k=config.block_k // 2) if deep else config


def of_one_layout(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers with the same strides, as kernels want them of two; copied where they differ."""
    if len({t.stride() for t in tensors}) == 1:
        return list(tensors)
    return [t.contiguous() for t in tensors]


def _sizes(config: Config, precision: str, offsets: Tensor, e: int, r: int, n: int, k: int) -> dict[str, Any]:
    return dict(
        offsets=offsets.contiguous(), E=e, R=r, N=n, K=k, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, GROUP=config.group, PRECISION=precision,
    )  # fmt: skip


def _programs(machine: Machine, config: Config, r: int, e: int, n: int) -> int:
    """As many as there can be tiles at most: each expert with rows may add one row of tiles."""
    return min(machine.programs, (-(-r // config.block_m) + min(e, r)) * -(-n // config.block_n))
