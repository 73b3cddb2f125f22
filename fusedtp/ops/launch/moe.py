"""Launchers of a mixture of experts' exchange."""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.device_view import odd, peers_of

from .config import ALL_REGISTERS, VECTOR, Config, Machine, block, gather_chunk, gather_programs
from .run import DTYPES, Launch, check, machine_for

# bytes of x by which a flag more, and a sender fewer, cost the same: about 5 us, what 7 polls take, by 50 GB/s
BALANCED = 256 * 1024


def dispatch_bytes(at: Any, slots_per_row: int, k: int, dtype: torch.dtype) -> int:
    """What a dispatch needs in a slot: x of the rank that has most, a row of it for so many slots."""
    return _most_rows(at, slots_per_row) * k * dtype.itemsize


def _most_rows(at: Any, slots_per_row: int) -> int:
    return max(at.sizes) * at.top_k // slots_per_row


def combine_bytes(tokens: int, top_k: int, n: int, dtype: torch.dtype) -> int:
    """What a combine needs in a slot: the rows of the most tokens a rank has."""
    return tokens * top_k * n * dtype.itemsize


def dispatch(
    view: Any,
    rank: int,
    x: Tensor,
    slots_per_row: int,
    orders: Tensor,
    layout: Any,
    at: Any,
    sig: int,
    config: Config | None = None,
) -> Tensor:
    """rows [max_rows, K] from x, see kernels/moe_exchange.py.

    x               [M, K]   any strides; bytes too
    slots_per_row            a row of x is of so many neighbouring slots: M of them are all slots of this rank
    orders          int32    of all ranks, as the plan has them
    layout                   of the plan, see ops/moe/layout.py; `at` is its Exchange
    """
    nbytes = dispatch_bytes(at, slots_per_row, x.shape[1], x.dtype)
    check(view, nbytes, x, [], dtypes=(*DTYPES, torch.uint8))
    machine = machine_for(view, x)
    launch, rows = plan_dispatch(view, rank, x, slots_per_row, orders, layout, at, sig, config, machine)
    launch.run(view, x.device)
    return rows


def plan_dispatch(
    view: Any, rank: int, x: Tensor, slots_per_row: int, orders: Tensor, layout: Any, at: Any, sig: int,
    config: Config | None, machine: Machine,
) -> tuple[Launch, Tensor]:  # fmt: skip
    """The launch of a dispatch, not yet run, and its rows."""
    from fusedtp.kernels.moe_exchange import moe_dispatch_kernel

    config = config or pulling(machine, at, slots_per_row, x, view.flags_per_source)
    rows = x.new_empty(at.max_rows, x.shape[1])
    args = dict(
        peers=peers_of(view, rank, at.world_size, sig, machine.clock),
        sizes=tuple(odd(n * at.top_k) for n in at.sizes),
        x=x,
        stride_xm=x.stride(0),
        stride_xk=x.stride(1),
        slots_per_row=slots_per_row,
        begins=layout.begins,
        orders=orders,
        in_sources=layout.in_sources,
        sources=layout.sources,
        arrivals=layout.arrivals,
        totals=layout.totals,
        max_rows=at.max_rows,
        rows=rows,
        K=x.shape[1],
        chunk_rows=config.chunk,
        send_programs=config.send_programs,
        BLOCK_M=config.block_m,
        PULL_M=_pulled_at_once(at, config),
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


def pulling(machine: Machine, at: Any, slots_per_row: int, x: Tensor, flags: int) -> Config:
    """Of a dispatch: one large program for each multiprocessor of this rank, a quarter of them to publish.

    Programs do not wait side by side, so that ranks which share a GPU have room for their other kernels; each has
    bytes enough on their way to keep memory busy, where rows are many. Chunks are what all ranks agree on: of sizes,
    top_k, and the row's bytes.
    """
    most, width, itemsize = _most_rows(at, slots_per_row), x.shape[1], x.element_size()
    if machine.clock == "host":
        senders, others = gather_programs(machine)
        chunk = gather_chunk(most, flags)
        return Config(64, 0, 256, send_programs=senders, other_programs=others, chunk=chunk)
    senders = max(1, machine.programs // 4)
    others = max(1, machine.programs - senders)
    # One chunk more is one flag more that every program polls; one less, longer until all is there.
    chunks = max(1, min(isqrt(most * width * itemsize // BALANCED), flags - 1))
    chunk = max(1, -(-most // chunks))
    columns = 2048 // max(2, itemsize)
    block_k = block(width, 1, columns)
    fits = 32 if width % VECTOR == 0 else 16  # rows in registers, which addresses of single elements take too
    block_m = min(256, fits * columns // block_k)
    registers = 128 if machine.clock == "cuda" else 0  # what 512 threads can have
    warps = 16 if machine.clock == "cuda" else 8
    programs: dict[str, Any] = dict(send_programs=senders, other_programs=others)
    return Config(block_m, 0, block_k, warps, chunk=chunk, max_registers=registers, **programs)


def _pulled_at_once(at: Any, config: Config) -> int:
    """Rows of a puller's block: as large as the publishers', unless pullers then had fewer than 16 each, if even."""
    each = sum(at.sizes) * at.top_k // at.world_size // config.other_programs
    return block(each // 16, min(4, config.block_m), config.block_m)
