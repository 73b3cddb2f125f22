"""Launcher of a dispatch with the matmul that its rows go into, see kernels/moe_dispatch_matmul.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.device_view import peers_of

from .config import Config, Machine
from .grouped import group_config, of_one_layout
from .moe import moving
from .run import Launch, check, machine_for


def dispatch_matmul_bytes(max_rows: int, k: int, dtype: torch.dtype) -> int:
    """What it needs in a slot: an owner's rows."""
    return max_rows * k * dtype.itemsize


def dispatch_matmul(
    view: Any,
    rank: int,
    x: Tensor,
    index: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    layout: Any,
    at: Any,
    sig: int,
    act: str = "",
    keep: bool = False,
    config: Config | None = None,
    *,
    precision: str = "ieee",
) -> list[Tensor]:
    """rows [max_rows, K] from x, and of each y = rows @ w[e].T, or act(rows @ gate[e].T) * (rows @ up[e].T).

    x         [M, K]      any strides
    index     int32       the row of x for each row that this rank sends
    weights   [E, N, K]   one, or gate and up; any strides
    offsets   [E + 1]     int32, where the rows of each expert begin
    layout                of the plan, see ops/moe/layout.py; `at` is its Exchange
    act       of a gated matmul; keep: return gate's and up's products too
    return    rows, y [max_rows, N], and the two products if `keep`
    """
    check(view, dispatch_matmul_bytes(at.max_rows, x.shape[1], x.dtype), x, weights)
    launch, outs = plan_dispatch_matmul(
        view, rank, x, index, weights, offsets, layout, at, sig, act, keep, config, precision,
        machine_for(view, x),
    )  # fmt: skip
    launch.run(view, x.device)
    return outs


def plan_dispatch_matmul(
    view: Any,
    rank: int,
    x: Tensor,
    index: Tensor,
    weights: Sequence[Tensor],
    offsets: Tensor,
    layout: Any,
    at: Any,
    sig: int,
    act: str,
    keep: bool,
    config: Config | None,
    precision: str,
    machine: Machine,
) -> tuple[Launch, list[Tensor]]:
    """The launch of dispatch_matmul, not yet run, and its outputs."""
    from fusedtp.kernels.moe_dispatch_matmul import moe_dispatch_matmul_kernel

    assert len(weights) == 1 + (act != "") and (act or not keep)
    r, (e, n, k) = at.max_rows, weights[0].shape
    moved = moving(machine, at, x, view.flags_per_source)
    config = config or _config(machine, moved, x.dtype, precision, r, e, n, len(weights), keep)
    w, *w2 = of_one_layout(weights)
    rows, *products = (x.new_empty(r, width) for width in (k, n, *[n, n] * keep))
    args = dict(
        peers=peers_of(view, rank, at.world_size, sig, machine.clock),
        x=x,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        index=index,
        begins=layout.begins,
        places=layout.at_owners,
        sources=layout.sources,
        blocks=layout.blocks,
        arrivals=layout.arrivals,
        origins=layout.origins,
        offsets=offsets.contiguous(),
        totals=layout.totals,
        max_rows=r,
        rows=rows,
        w=w,
        w2=w2[0] if w2 else None,
        strides=w.stride(),
        y=products[0],
        gate_out=products[1] if keep else None,
        up_out=products[2] if keep else None,
        E=e,
        N=n,
        K=k,
        chunk_rows=config.chunk,
        send_programs=config.send_programs,
        copy_programs=config.send_programs,
        COPY_M=moved.block_m,
        COPY_K=moved.block_k,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP=config.group,
        EVEN_K=k % config.block_k == 0,
        HALVES=config.halves,
        ACT=act,
        PRECISION=precision,
    )
    programs = 2 * config.send_programs + config.other_programs
    return Launch(moe_dispatch_matmul_kernel, programs, args, config), [rows, *products]


def _config(
    machine: Machine,
    moved: Config,
    dtype: torch.dtype,
    precision: str,
    rows: int,
    groups: int,
    n: int,
    weights: int,
    keep: bool,
) -> Config:
    """The grouped matmul's own tiles; as many programs copy what came as send, and the others multiply."""
    tile = group_config(machine, dtype, precision, rows, groups, n, weights, keep)
    return replace(
        tile,
        send_programs=moved.send_programs,
        other_programs=max(1, moved.other_programs - moved.send_programs),
        chunk=moved.chunk,
    )
