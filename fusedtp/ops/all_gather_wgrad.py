"""dw_i [N_i, K] = dy_i [T, N_i].T @ all_gather(x [T_r, K]): the weight gradients of column-parallel layers.

The sum over T runs shard by shard: the rows of a shard are added as soon as they have arrived. Not differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm import Group, place, propagate_errors
from fusedtp.comm.copies import Copies

from .all_gather_matmul import choose_config, gather_args, gather_slot_bytes, sending_of, without_senders
from .launch.config import VECTOR, Config, Machine
from .launch.operands import even_columns, picked
from .launch.run import Launch, check, machine_for
from .matmul import is_16_bit, matmul_as, to_fp32, widens
from .operation import Operation, Plan, Shared, Spec
from .rows import Rows, rows_of_shard
from .shards import shards_as_they_arrive


def all_gather_wgrad(
    x: Tensor,
    dys: Sequence[Tensor],
    group: Group,
    *,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    engine: str = "auto",
) -> tuple[Tensor, ...]:
    """Weight gradients of column-parallel layers, whose input was saved as a shard. Not differentiable.

        x       [T_r, K]  this rank's rows; with dim=1 [B, S_r, K]
        dys     [T, N_i]  gradients of the outputs; with dim=1 [B, S, N_i]
        sizes   every rank's rows, the same list on all ranks; None: as many as here
        return  [N_i, K]  dw_i = dy_i.T @ all_gather(x)

    Raises ValueError for shapes or dtypes that do not fit, SignatureMismatch naming the rank that differs.
    """
    at = place(group)
    with propagate_errors(at):
        rows = rows_of_shard(x, at, sizes, dim)
        flat = [dy.detach().flatten(0, -2) for dy in dys]
        for dy in flat:
            if dy.shape[0] != rows.total or dy.dtype != x.dtype:
                raise ValueError(
                    f"rank {at.rank}: dy has {dy.shape[0]} rows of {dy.dtype}, x {rows.total} in all of {x.dtype}"
                )
        spec = Spec(at.name, at.rank, rows.sizes, rows.batch, engine)
        return tuple(op(spec, x.detach().flatten(0, -2), flat, x.dtype))


# -- engines; `dtype` of the result is x's, or fp32 ------------------------------------------------------------------


def reference(x: Tensor, dys: Sequence[Tensor]) -> list[Tensor]:
    """The formula on one device: the full x [T, K], the full dys."""
    return [dy.t() @ x for dy in dys]


def local(plan: Plan, x: Tensor, dys: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """A group of one rank."""
    return [matmul_as(dy.t(), x, dtype) for dy in dys]


def collective(plan: Plan, x: Tensor, dys: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The process group's all_gather, then matmuls."""
    rows, comm = plan.rows, plan.comm
    with comm.agreed(plan.signature):
        counts = [rows.local(p) for p in range(comm.world_size)]
        full = rows.gather(comm.all_gather(x, counts).split(counts))
    return [matmul_as(dy.t(), full, dtype) for dy in dys]


def chunked(plan: Plan, x: Tensor, dys: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Accumulates shard by shard where that rounds no more than one matmul does; else gathers the shards first."""
    rows, comm, width = plan.rows, plan.comm, x.shape[1]
    gathers = is_16_bit(x.dtype) and not widens(x)
    full = x.new_empty(rows.total, width) if gathers else None
    sums = x.dtype if not widens(x) else torch.float32
    dws = [x.new_zeros(dy.shape[1], width, dtype=sums) for dy in dys]
    with comm.workspace.call(plan.signature, rows.longest * width * x.element_size()) as call:
        for p, shard in shards_as_they_arrive(call, comm, x, rows):
            with comm.span(f"matmul {p}"):
                if full is not None:
                    for block, part in rows.pairs(full, shard, p):
                        block.copy_(part)
                    continue
                for dw, dy in zip(dws, dys, strict=True):
                    for block, part in rows.pairs(dy, shard, p):
                        dw.addmm_(to_fp32(block).t(), to_fp32(part))
    return [dw.to(dtype) for dw in dws] if full is None else [matmul_as(dy.t(), full, dtype) for dy in dys]


def triton(plan: Plan, x: Tensor, dys: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """One launch: programs push x to all peers, or copies bring it, while the others sum over what has arrived."""
    comm, rows = plan.comm, plan.rows
    with comm.workspace.call(plan.signature, gather_slot_bytes(rows, x.shape[1], x.dtype)) as call:
        copies = call.copies() if plan.copies else None
        at, sig = (call.kernel_view(), comm.rank, comm.world_size), plan.signature.hash32()
        return run_all_gather_wgrad(*at, x, dys, rows, sig, dtype=dtype, copies=copies)


op = Operation(
    "all_gather_wgrad",
    "Tensor x, Tensor[] dys, ScalarType dtype",
    "Tensor[]",
    fake=lambda spec, x, dys, dtype: [x.new_empty(dy.shape[1], x.shape[1], dtype=dtype) for dy in dys],
    shared=lambda x, dys, dtype: Shared(x.dtype, x.shape[1], len(dys)),
    engines=dict(local=local, collective=collective, chunked=chunked, triton=triton),
)


# -- the launcher of the kernel --------------------------------------------------------------------------------------


def run_all_gather_wgrad(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    dys: Sequence[Tensor],
    rows: Rows,
    sig: int,
    config: Config | None = None,
    dtype: torch.dtype | None = None,
    copies: Copies | None = None,
) -> list[Tensor]:
    """Plan the launch and start it; `copies` bring x in place of programs. See `plan_all_gather_wgrad`."""
    check(view, gather_slot_bytes(rows, x.shape[1], x.dtype), x, dys)
    x, machine = x if copies is None else x.contiguous(), machine_for(view, x)
    at, by_copies = (view, rank, world_size), copies is not None
    launch, outputs = plan_all_gather_wgrad(*at, x, dys, rows, sig, config, machine, dtype, by_copies)
    launch.run(view, x.device, sending_of(copies, rank, x, rows, launch.config))
    return outputs


def plan_all_gather_wgrad(
    view: Any,
    rank: int,
    world_size: int,
    x: Tensor,
    dys: Sequence[Tensor],
    rows: Rows,
    sig: int,
    config: Config | None,
    machine: Machine,
    dtype: torch.dtype | None = None,
    copied: bool = False,
) -> tuple[Launch, list[Tensor]]:
    """The launch, not yet run, and its outputs dw_i [N_i, K] of `dtype` (fp32: as accumulated; None: x's).

    x        [R_r, K]   any strides
    dy_i     [T, N_i]   rows in global order, any strides
    config   None: the tuned one, or the default
    copied   x travels beside the kernel, in copies
    """
    from fusedtp.kernels.all_gather_wgrad import all_gather_wgrad_kernel

    k, out_rows = x.shape[1], sum(dy.shape[1] for dy in dys)
    if config is None:
        at = dict(rows=out_rows, cols=k, k=rows.total, even=k % VECTOR == 0)
        config = choose_config("all_gather_wgrad", machine, x.dtype, rows, view.flags_per_source, k, **at)
        if rows.batch > 1 and config.block_n == 256 and config.block_k > 32:
            # Rows in runs have no common stride: beside so wide a tile, 64 addresses do not fit a thread's registers.
            config = replace(config, block_k=32, num_stages=4)
    config = without_senders(config, machine) if copied else config
    widths = [dy.shape[1] for dy in dys]
    dys = [even_columns(dy) for dy in dys]
    outputs = [x.new_empty(dy.shape[1], k, dtype=dtype) for dy in dys]
    even_k = all(size % config.block_k == 0 for size in rows.sizes)
    args = dict(
        **gather_args(view, rank, world_size, x, rows, sig, config, machine),
        **picked(config, dys, (config.block_k, config.block_m), usable=even_k and rows.batch == 1),
        grads=tuple(dys),
        widths=tuple(dy.shape[1] for dy in dys),
        strides_dn=tuple(dy.stride(1) for dy in dys),
        strides_dt=tuple(dy.stride(0) for dy in dys),
        nothing=(None,) * len(dys),
        outputs=tuple(outputs),
        NUM_WEIGHTS=len(dys),
        EVEN_K=even_k,
    )
    launch = Launch(all_gather_wgrad_kernel, config.send_programs + config.other_programs, args, config)
    return launch, [dw[:width] for dw, width in zip(outputs, widths, strict=True)]
