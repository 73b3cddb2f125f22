"""Launcher of the matmul of experts that is one with its combine, see kernels/moe_matmul_combine.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm.device_view import peers_of

from .config import Config, Machine
from .grouped import group_config, of_one_layout
from .moe import combine_bytes
from .run import Launch, check, machine_for

NARROW = 128  # columns
PARTS = 4  # of the columns, where there are so many tiles


def matmul_combine(
    view: Any,
    rank: int,
    hs: Sequence[Tensor],
    matrices: Sequence[Tensor],
    offsets: Tensor,
    homes: Any,
    choices: Tensor,
    weights: Tensor | None,
    layout: Any,
    at: Any,
    sig: int,
    config: Config | None = None,
    *,
    precision: str = "ieee",
) -> Tensor:
    """out [T, N] = sum_j weights[:, j] y[row of (:, j)], of y [max_rows, N] = sum_i hs[i] @ matrices[i][e].T.

    hs         [max_rows, K]  one or two, any strides, as their matrices [E_r, N, K] may have
    offsets    int32 [E_r + 1]
    homes      of the plan, see ops/moe/homes.py, as `layout` is, see layout.py; `at` is its Exchange
    choices    int32 [T, k]   where in this rank's order each choice stands
    weights    fp32 [T, k], or None for ones
    precision  of fp32 operands: "ieee" or "tf32", the same on all ranks
    """
    h, n = hs[0], matrices[0].shape[1]
    check(view, combine_bytes(max(at.sizes), at.top_k, n, h.dtype), h, [*hs[1:], *matrices])
    where, sums = (view, rank, hs, matrices, offsets, homes), (choices, weights, layout, at, sig)
    launch, out = plan_matmul_combine(*where, *sums, config, precision, machine_for(view, h))
    launch.run(view, h.device)
    return out


def plan_matmul_combine(
    view: Any, rank: int, hs: Sequence[Tensor], matrices: Sequence[Tensor], offsets: Tensor, homes: Any,
    choices: Tensor, weights: Tensor | None, layout: Any, at: Any, sig: int, config: Config | None,
    precision: str, machine: Machine,
) -> tuple[Launch, Tensor]:  # fmt: skip
    """The launch of a matmul and combine, not yet run, and its output."""
    from fusedtp.kernels.moe_matmul_combine import moe_matmul_combine_kernel

    assert 1 <= len(hs) == len(matrices) <= 2
    (h, *h2), (w, *w2) = of_one_layout(hs), of_one_layout(matrices)
    (r, k), (e, n, _) = h.shape, w.shape
    config = config or returning(machine, h.dtype, precision, at, n, view.flags_per_source, len(hs))
    out = h.new_empty(choices.shape[0], n)
    chunk_rows = config.chunk * config.block_m
    args = dict(
        peers=peers_of(view, rank, at.world_size, sig, machine.clock),
        x=h,
        w=w,
        x2=h2[0] if h2 else None,
        w2=w2[0] if w2 else None,
        strides=(*h.stride(), *w.stride()),
        offsets=offsets.contiguous(),
        to=homes.to,
        at=homes.at,
        items=items_of(homes.counts, at.world_size, chunk_rows),
        begins=layout.begins,
        totals=layout.totals,
        max_rows=at.max_rows,
        choices=choices,
        weights=None if weights is None else weights.contiguous(),
        out=out,
        E=e,
        R=r,
        T=choices.shape[0],
        N=n,
        K=k,
        chunk_rows=chunk_rows,
        part_tiles=config.part_tiles,
        send_programs=config.send_programs,
        TOP_K=choices.shape[1],
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        PART_M=min(config.block_m, max(1, config.part * config.num_warps // config.block_n)),
        EVEN_K=k % config.block_k == 0,
        HALVES=config.halves,
        PRECISION=precision,
    )
    programs = config.send_programs + config.other_programs
    return Launch(moe_matmul_combine_kernel, programs, args, config), out


def items_of(counts: Tensor, world_size: int, chunk_rows: int) -> Tensor:
    """counts [E], rows of every expert -> int32 [W + 1]: where the items of each owner begin among those of all."""
    each = (counts + (chunk_rows - 1)) // chunk_rows
    ends = each.view(world_size, -1).sum(1).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)


def returning(
    machine: Machine,
    dtype: torch.dtype,
    precision: str,
    at: Any,
    n: int,
    flags: int,
    products: int = 1,
) -> Config:
    """The tiles of the grouped matmul; items and parts of what all ranks share alone.

    Items are as small as the flags allow. An eighth of the machine sums beside the others, which multiply. The sum of
    two products would spill in the widest tile, by what the lint shows.
    """
    config = group_config(machine, dtype, precision, at.max_rows, at.experts_here, n)
    if products > 1:
        widest = NARROW // 2 if 0 < machine.capability < 90 else NARROW
        config = replace(config, block_n=min(config.block_n, widest))
    tiles = max(1, -(-n // config.block_n))
    part, room = tiles, flags - 1 - at.experts_here  # an expert's last item may be a smaller one
    assert room > 0, (flags, at)
    quarter = -(-tiles // PARTS)
    of_each = (flags - 1) // -(-tiles // quarter) - at.experts_here
    if of_each > 0:
        part, room = quarter, of_each
    chunk = max(1, -(-at.max_rows // (room * config.block_m)))
    reducers = max(1, machine.programs // 8)
    senders = max(1, machine.programs - reducers)
    return replace(config, part_tiles=part, chunk=chunk, send_programs=senders, other_programs=reducers)
