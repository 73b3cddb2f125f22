"""Launchers of a mixture of experts' exchange."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.device_view import peers_of

from .config import ALL_REGISTERS, Config, Machine, gather_chunk, gather_programs
from .run import DTYPES, Launch, check, machine_for


def dispatch_bytes(max_rows: int, k: int, dtype: torch.dtype) -> int:
    """What a dispatch needs in a slot: an owner's rows."""
    return max_rows * k * dtype.itemsize


def combine_bytes(tokens: int, top_k: int, n: int, dtype: torch.dtype) -> int:
    """What a combine needs in a slot: the rows of the most tokens a rank has."""
    return tokens * top_k * n * dtype.itemsize


def dispatch(
    view: Any,
    rank: int,
    x: Tensor,
    index: Tensor,
    layout: Any,
    at: Any,
    sig: int,
    config: Config | None = None,
) -> Tensor:
    """rows [max_rows, K] from x, see kernels/moe_exchange.py.

    x       [M, K]     any strides; bytes too
    index   int32      the row of x for each row that this rank sends
    layout             of the plan, see ops/moe/layout.py; `at` is its Exchange
    """
    check(view, dispatch_bytes(at.max_rows, x.shape[1], x.dtype), x, [], dtypes=(*DTYPES, torch.uint8))
    launch, rows = plan_dispatch(view, rank, x, index, layout, at, sig, config, machine_for(view, x))
    launch.run(view, x.device)
    return rows


def plan_dispatch(
    view: Any, rank: int, x: Tensor, index: Tensor, layout: Any, at: Any, sig: int, config: Config | None,
    machine: Machine,
) -> tuple[Launch, Tensor]:  # fmt: skip
    """The launch of a dispatch, not yet run, and its rows."""
    from fusedtp.kernels.moe_exchange import moe_dispatch_kernel

    config = config or moving(machine, at, x, view.flags_per_source)
    rows = x.new_empty(at.max_rows, x.shape[1])
    args = dict(
        peers=peers_of(view, rank, at.world_size, sig, machine.clock),
        x=x,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        index=index,
        begins=layout.begins,
        places=layout.at_owners,
        sources=layout.sources,
        arrivals=layout.arrivals,
        totals=layout.totals,
        max_rows=at.max_rows,
        rows=rows,
        K=x.shape[1],
        chunk_rows=config.chunk,
        send_programs=config.send_programs,
        BLOCK_M=config.block_m,
        BLOCK_K=config.block_k,
    )
    return Launch(moe_dispatch_kernel, config.send_programs + config.other_programs, args, config), rows


def combine(
    view: Any,
    rank: int,
    y: Tensor,
    choices: Tensor,
    weights: Tensor | None,
    layout: Any,
    at: Any,
    sig: int,
    config: Config | None = None,
) -> Tensor:
    """out [T, N] = sum_j weights[:, j] y[row of (:, j)], see kernels/moe_exchange.py.

    y        [max_rows, N]   any strides
    choices  int32 [T, k']   where in this rank's order each choice stands
    weights  fp32 [T, k'], or None for ones
    """
    nbytes = combine_bytes(max(at.sizes), at.top_k, y.shape[1], y.dtype)
    check(view, nbytes, y, [])
    launch, out = plan_combine(view, rank, y, choices, weights, layout, at, sig, config, machine_for(view, y))
    launch.run(view, y.device)
    return out


def plan_combine(
    view: Any, rank: int, y: Tensor, choices: Tensor, weights: Tensor | None, layout: Any, at: Any, sig: int,
    config: Config | None, machine: Machine,
) -> tuple[Launch, Tensor]:  # fmt: skip
    """The launch of a combine, not yet run, and its output."""
    from fusedtp.kernels.moe_exchange import moe_combine_kernel

    config = config or moving(machine, at, y, view.flags_per_source)
    out = y.new_empty(choices.shape[0], y.shape[1])
    args = dict(
        peers=peers_of(view, rank, at.world_size, sig, machine.clock),
        y=y,
        stride_ym=y.stride(0),
        stride_yn=y.stride(1),
        arrivals=layout.arrivals,
        sources=layout.sources,
        places=layout.in_sources,
        begins=layout.begins,
        totals=layout.totals,
        max_rows=at.max_rows,
        choices=choices,
        weights=None if weights is None else weights.contiguous(),
        out=out,
        T=choices.shape[0],
        N=y.shape[1],
        chunk_rows=config.chunk,
        send_programs=config.send_programs,
        TOP_K=choices.shape[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_k,
    )
    return Launch(moe_combine_kernel, config.send_programs + config.other_programs, args, config), out


def moving(machine: Machine, at: Any, x: Tensor, flags: int) -> Config:
    """A block of whole cache lines of a few rows; chunks that all ranks agree on: of sizes, top_k and experts alone."""
    senders, others = gather_programs(machine)
    longest = max(at.sizes) * min(at.top_k, at.experts_here)
    chunk = gather_chunk(longest, flags)
    if machine.clock == "host":
        return Config(64, 0, 256, send_programs=senders, other_programs=others, chunk=chunk)
    wide, every = 2048 // max(2, x.element_size()), ALL_REGISTERS if machine.clock == "cuda" else 0
    programs: dict[str, Any] = dict(send_programs=senders, other_programs=others)
    return Config(8, 0, wide, num_warps=4, chunk=chunk, max_registers=every, **programs)
