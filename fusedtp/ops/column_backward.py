"""Gradients of column-parallel layers y_i = all_gather(x) @ w_i.T: dx by a reduce-scatter, dw_i by an all-gather.

Both exchanges belong to one pass, so on a CPU they share one call, and a rank waits for its peers once, late:

    chunked    x to slot | dy_p @ w of each peer | publish | own dy @ w | wait r+1 | dw += ... | ... | sum of dx
                                                                       the peer has published long ago

Elsewhere they are two operations, one kernel each: matmul_reduce_scatter, then all_gather_wgrad.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fusedtp.comm import Communicator, registered

from . import engines
from .matmul import is_16_bit, joined, matmul_as, matmul_into, sum_in_rank_order, to_fp32, widens
from .measured import GENERATION
from .operation import MAX_PLANS, Operation, Plan, Shared, Spec
from .rows import Rows
from .shards import as_they_arrive, partials_of, ring

TOGETHER = ("auto", "chunked")  # engines that may compute both in one call


def in_one_call(spec: Spec, x: Tensor | None) -> bool:
    """Whether both run on CPU ranks that read each other's shards. All ranks decide alike."""
    if x is None or x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    comm = registered(spec.group)
    key = spec.sizes, spec.batch, spec.engine, x.dtype, x.shape[1], GENERATION[0]
    found = comm.joint.get(key)
    if found is None:
        rows = Rows(spec.sizes, spec.batch)
        if len(comm.joint) >= MAX_PLANS:
            comm.joint.clear()
        found = comm.joint[key] = all(
            engines.choose(comm, spec.engine, rows, x.dtype, name, x.shape[1]).engine == "chunked"
            for name in ("matmul_reduce_scatter", "all_gather_wgrad")
        )
    return found


def reference(x: Tensor, dys: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """The formula on one device: the full x [T, K], dys [T, N_i] and weights [N_i, K]."""
    dx = sum((dy @ w for dy, w in zip(dys, weights, strict=True)), torch.zeros_like(x))
    return [dx, *(dy.t() @ x for dy in dys)]


def chunked(plan: Plan, x: Tensor, dys: list[Tensor], weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """See the module's docstring; `dtype` is that of the weight gradients."""
    rows, comm, width = plan.rows, plan.comm, x.shape[1]
    lefts, rights = joined(dys, [w.t() for w in weights])
    rights = [to_fp32(w).t() for w in rights]
    blocks = [rows.parts(dy) for dy in lefts]
    own_partial = x.new_empty(x.shape)
    with plan.call() as call:
        # no peer reads this rank's partial of its own rows, so its place holds the rows of x
        shards = [partials_of(call, p, rows, width, x.dtype, p) for p in range(comm.world_size)]
        shards[comm.rank].copy_(x)
        for p in ring(comm, own="last"):
            mine = p == comm.rank
            partial = own_partial if mine else partials_of(call, comm.rank, rows, width, x.dtype, p)
            with comm.span(f"matmul {p}"):
                for out, *own in zip(rows.runs(partial, p), *(of_dy[p] for of_dy in blocks), strict=True):
                    matmul_into(out, own, rights)
            if not mine:
                call.publish(p)

        arriving = ((p, shards[p]) for p in as_they_arrive(call, comm))
        dws = wgrads(arriving, comm, rows, dys, x, dtype)
        with comm.span("sum"):
            partials = [partials_of(call, p, rows, width, x.dtype, comm.rank) for p in range(comm.world_size)]
            partials[comm.rank] = own_partial
            return [sum_in_rank_order(partials), *dws]


def wgrads(
    arriving: Iterable[tuple[int, Tensor]],
    comm: Communicator,
    rows: Rows,
    dys: Sequence[Tensor],
    x: Tensor,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Accumulate shard by shard if that rounds no more than a single matmul; else gather the shards first.

    arriving   (rank, its rows), as they arrive; x, one of the shards, gives their dtype and width
    """
    width = x.shape[1]
    gathers = is_16_bit(x.dtype) and not widens(x)
    full = x.new_empty(rows.total, width) if gathers else None
    sums = x.dtype if not widens(x) else torch.float32
    dws = [] if gathers else [x.new_zeros(dy.shape[1], width, dtype=sums) for dy in dys]
    blocks = [] if gathers else [rows.parts(dy) for dy in dys]
    for p, shard in arriving:
        with comm.span(f"matmul {p}"):
            if full is not None:
                rows.put(full, shard, p)
                continue
            for dw, of_dy in zip(dws, blocks, strict=True):
                for block, run in zip(of_dy[p], rows.runs(shard, p), strict=True):
                    dw.addmm_(to_fp32(block).t(), to_fp32(run))
    return [dw.to(dtype) for dw in dws] if full is None else [matmul_as(dy.t(), full, dtype) for dy in dys]


def _fake(spec: Spec, x: Tensor, dys: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(x), *(x.new_empty(w.shape, dtype=dtype) for w in weights)]


op = Operation(
    "column_grads",
    "Tensor x, Tensor[] dys, Tensor[] weights, ScalarType dtype",
    "Tensor[]",
    fake=_fake,
    reference=reference,
    shared=lambda x, dys, weights, dtype: Shared(x.dtype, x.shape[1], len(dys)),
    engines=dict(chunked=chunked),
    slot_bytes=dict(chunked=lambda rows, shared: rows.total * shared.features * shared.dtype.itemsize),
    choose=lambda name, comm, spec, rows, shared: engines.Choice("chunked", "both of its halves are"),
)
