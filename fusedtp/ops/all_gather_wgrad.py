"""dw_i [N_i, K] = dy_i [T, N_i].T @ all_gather(x [T_r, K]): the weight gradients of column-parallel layers.

The sum over T runs shard by shard: a shard's rows are added as soon as they arrive. Not differentiable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusedtp.comm import Group, place, propagate_errors
from fusedtp.comm.device_view import peers_of
from fusedtp.comm.launching import Launch, layouts

from .all_gather_matmul import (
    choose_config,
    gather_args,
    gather_slot_bytes,
    sending_of,
    without_senders,
)
from .column_backward import wgrads
from .launch.config import VECTOR, Config, Machine
from .launch.operands import DESCRIPTORS, describe, even_columns, takes_tma
from .launch.run import check, machine_for
from .matmul import matmul_as
from .operation import Example, FusedKernel, OnRank, Operation, Plan, Shared, Spec
from .rows import Rows, rows_of_shard
from .shards import gathered, shards_as_they_arrive


def all_gather_wgrad(
    x: Tensor,
    dys: Sequence[Tensor],
    group: Group,
    *,
    sizes: Sequence[int] | None = None,
    dim: int = 0,
    engine: str = "auto",
) -> tuple[Tensor, ...]:
    """Weight gradients of column-parallel layers that saved a shard of their input. Not differentiable.

        x       [T_r, K]  this rank's rows; with dim=1 [B, S_r, K]
        dys     [T, N_i]  gradients of the outputs; with dim=1 [B, S, N_i]
        sizes   every rank's rows, the same list on all ranks; None: as many as here
        return  [N_i, K]  dw_i = dy_i.T @ all_gather(x)

    Raises ValueError for shapes or dtypes that do not fit, SignatureMismatch naming the rank that differs.
    """
    at = place(group)
    with propagate_errors(at):
        rows = rows_of_shard(x, at, sizes, dim)
        if not x.dtype.is_floating_point:
            raise ValueError(f"rank {at.rank}: x is {x.dtype}; the operations take floating-point tensors")
        dys, lead = list(dys), (rows.total,) if dim == 0 else (rows.batch, rows.length)
        for dy in dys:
            if tuple(dy.shape[:-1]) != lead or dy.dtype != x.dtype or dy.device != x.device:
                raise ValueError(
                    f"rank {at.rank}: dy is {tuple(dy.shape)} {dy.dtype} on {dy.device}; for this x it must be "
                    f"[{', '.join(map(str, lead))}, N] {x.dtype} on {x.device}"
                )
        flat = [dy.detach().flatten(0, -2) for dy in dys]
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
    full = gathered(plan, x)
    return [matmul_as(dy.t(), full, dtype) for dy in dys]


def chunked(plan: Plan, x: Tensor, dys: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Shard by shard as they arrive, own rows first."""
    with plan.call() as call:
        arriving = shards_as_they_arrive(call, plan.comm, x, plan.rows)
        return wgrads(arriving, plan.comm, plan.rows, dys, x, dtype)


def triton(plan: Plan, x: Tensor, dys: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """One launch: some programs push x to all peers, or copies bring it, while the others sum over arrived rows."""
    rows, padded = plan.rows, []
    for dy in dys:
        padded.append(even_columns(dy) if dy.shape[1] % VECTOR else dy)
    with plan.call() as call:
        copies = call.copies() if plan.copies else None
        x = x if copies is None else x.contiguous()
        view = call.kernel_view()
        key = copies is None, dtype, layouts(x, *padded)
        launch = plan.launches.get(key)
        if launch is None:
            check(view, plan.slot_bytes, x, dys)
            launch = prepare(view, x, padded, rows, None, machine_for(view, x), copies is not None)
            plan.launches[key] = launch
        outputs = []
        for dy in padded:
            outputs.append(x.new_empty(dy.shape[1], x.shape[1], dtype=dtype))
        sending = None if copies is None else sending_of(copies, plan.comm.rank, x, rows, launch.config)
        given = pointers(launch, plan.peers(view), x, padded, outputs)
        launch.run(view, x.device, sending, given, alike=True)
    for i, dy in enumerate(dys):
        outputs[i] = outputs[i][: dy.shape[1]]
    return outputs


def _launched(
    at: OnRank, x: Tensor, dys: Sequence[Tensor], _: Any, keep: bool, copied: bool, dtype: torch.dtype | None
) -> tuple[Launch, dict[str, Tensor]]:
    launch, dws = plan_all_gather_wgrad(
        at.view, at.rank, at.world_size, x, dys, at.rows, at.sig, at.config, at.machine, dtype, copied
    )
    return launch, {f"y{i}": dw for i, dw in enumerate(dws)}


op = Operation(
    "all_gather_wgrad",
    "Tensor x, Tensor[] dys, ScalarType dtype",
    "Tensor[]",
    fake=lambda spec, x, dys, dtype: [x.new_empty(dy.shape[1], x.shape[1], dtype=dtype) for dy in dys],
    reference=reference,
    shared=lambda x, dys, dtype: Shared(x.dtype, x.shape[1], len(dys)),
    engines=dict(local=local, collective=collective, chunked=chunked, triton=triton),
    slot_bytes=dict(
        chunked=lambda rows, shared: rows.longest * shared.features * shared.dtype.itemsize,
        triton=lambda rows, shared: gather_slot_bytes(rows, shared.features, shared.dtype),
    ),
    example=Example(
        "column",
        "gather",
        shapes=lambda own, total, k, n: ((own, k), (total, n)),
        factors=lambda x, dy: (dy.t(), x.t()),
        call=lambda x, dy, group, sizes, engine: all_gather_wgrad(x, [dy], group, sizes=sizes, engine=engine)[0],
    ),
    kernels=(
        FusedKernel(
            "all_gather_wgrad",
            "all_gather_wgrad_kernel",
            _launched,
            gathers=True,
            others="TN",
        ),
    ),
)


# -- the launcher of the kernel --------------------------------------------------------------------------------------


def prepare(
    view: Any,
    x: Tensor,
    dys: Sequence[Tensor],
    rows: Rows,
    config: Config | None,
    machine: Machine,
    copied: bool = False,
) -> Launch:
    """The launch without its pointers, for operands of these shapes, strides and alignments.

    x        [R_r, K]   any strides
    dy_i     [T, N_i]   rows in global order, any strides, `even_columns`
    config   None: the tuned one, or the default
    copied   copies send x while the kernel runs
    """
    from fusedtp.kernels.all_gather_wgrad import all_gather_wgrad_kernel

    k, out_rows = x.shape[1], sum(dy.shape[1] for dy in dys)
    if config is None:
        at = dict(rows=out_rows, cols=k, k=rows.total, even=k % VECTOR == 0)
        config = choose_config("all_gather_wgrad", machine, x.dtype, rows, view.flags_per_source, k, **at)
        if rows.batch > 1 and config.block_n == 256 and config.block_k > 32:
            # Rows in runs have no common stride, and 64 addresses do not fit in a thread's registers next to this tile.
            config = replace(config, block_k=32, num_stages=4)
    config = without_senders(config, machine) if copied else config
    even_k = all(size % config.block_k == 0 for size in rows.sizes)
    args = dict(
        **gather_args(x, rows, config, machine),
        TMA=even_k and rows.batch == 1 and takes_tma(config, *dys),
        widths=tuple(dy.shape[1] for dy in dys),
        strides_dn=tuple(dy.stride(1) for dy in dys),
        strides_dt=tuple(dy.stride(0) for dy in dys),
        nothing=(None,) * len(dys),
        NUM_WEIGHTS=len(dys),
        EVEN_K=even_k,
    )
    return Launch(all_gather_wgrad_kernel, config.send_programs + config.other_programs, args, config)


def pointers(launch: Launch, peers: Any, x: Tensor, dys: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, Any]:
    """The remaining arguments of a prepared launch. outputs dw_i [N_i, K] in x's dtype, or fp32 as accumulated."""
    args = dict(peers=peers, x=x, grads=tuple(dys), outputs=tuple(outputs))
    if launch.args["TMA"]:
        describe(args, DESCRIPTORS, dys, [launch.config.block_k, launch.config.block_m])
    return args


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
    """The complete launch, not yet run, and its outputs; see `prepare` and `pointers`."""
    padded = [even_columns(dy) for dy in dys]
    launch = prepare(view, x, padded, rows, config, machine, copied)
    outputs = [x.new_empty(dy.shape[1], x.shape[1], dtype=dtype) for dy in padded]
    peers = peers_of(view, rank, world_size, sig, machine.clock)
    made = [dw[: dy.shape[1]] for dw, dy in zip(outputs, dys, strict=True)]
    return launch.given(pointers(launch, peers, x, padded, outputs)), made
