"""dw_i [N_i, K] = dy_i [T, N_i].T @ gather(x [T_r, K]): the weight gradients of a column-parallel layer.

The reduction axis is gated shard by shard: the rows of a shard are added as soon as it is there.
Siblings: `collective`, `chunked`, `triton`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedtp.comm import Communicator, Signature

from . import engines
from .local import shards_as_they_come
from .matmul import is_16_bit, matmul_as, wide, widens
from .profile import record_function
from .rows import Rows


def collective(
    comm: Communicator,
    x: Tensor,
    dys: Sequence[Tensor],
    rows: Rows,
    signature: Signature,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The process group's all_gather, then matmuls."""
    with comm.agreed(signature):
        counts = [rows.local(p) for p in range(comm.world_size)]
        full = rows.gather(comm.all_gather(x, counts).split(counts))
    return [matmul_as(dy.t(), full, dtype) for dy in dys]


def chunked(
    comm: Communicator,
    x: Tensor,
    dys: Sequence[Tensor],
    rows: Rows,
    signature: Signature,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Accumulates shard by shard where that rounds no more than one matmul does; else gathers the shards first."""
    width = x.shape[1]
    gathers = is_16_bit(x.dtype) and not widens(x)
    full = x.new_empty(rows.total, width) if gathers else None
    sums = x.dtype if not widens(x) else torch.float32
    dws = [x.new_zeros(dy.shape[1], width, dtype=sums) for dy in dys]
    most = max(rows.sizes) * rows.batch * width * x.element_size()
    with comm.workspace.call(signature, most) as call:
        for p, shard in shards_as_they_come(call, comm, x, rows):
            with comm.span(f"matmul {p}"):
                if full is not None:
                    for block, part in rows.pairs(full, shard, p):
                        block.copy_(part)
                else:
                    for dw, dy in zip(dws, dys, strict=True):
                        for block, part in rows.pairs(dy, shard, p):
                            dw.addmm_(wide(block).t(), wide(part))
    return [dw.to(dtype) for dw in dws] if full is None else [matmul_as(dy.t(), full, dtype) for dy in dys]


def triton(
    comm: Communicator,
    x: Tensor,
    dys: Sequence[Tensor],
    rows: Rows,
    signature: Signature,
    dtype: torch.dtype,
    transport: str = "programs",
) -> list[Tensor]:
    """One launch: programs push x to all peers, or copies bring it, and the others sum over what has come."""
    from . import launch

    with comm.workspace.call(signature, launch.all_gather_bytes(rows, x.shape[1], x.dtype)) as call:
        copies = call.copies() if transport == "copy" else None
        with call.device_view() as view:
            at, sig = (view, comm.rank, comm.world_size), signature.hash32()
            return launch.all_gather_wgrad(*at, x, dys, rows, sig, dtype=dtype, copies=copies)


def run(
    comm: Communicator,
    x: Tensor,
    dys: Sequence[Tensor],
    rows: Rows,
    engine: str,
    layer: str = "",
    dtype: torch.dtype | None = None,
    transport: str | None = None,
) -> list[Tensor]:
    """x [rows.local(rank), K], dy_i [rows.total, N_i] -> dw_i [N_i, K] of x's dtype, or fp32. No autograd.

    transport: of `triton`, "programs" or "copy" where copies can; None as `engines.choose` says.
    """
    dtype = dtype or x.dtype
    choice = engines.choose(comm, engine, rows, x.dtype, "all_gather_wgrad", x.shape[1])
    engine = choice.engine
    engines.count(comm, "all_gather_wgrad", engine, layer)
    with record_function(f"fusedtp.all_gather_wgrad.{engine}"):
        if engine == "local":
            return [matmul_as(dy.t(), x, dtype) for dy in dys]
        signature = Signature(
            "all_gather_wgrad",
            engine,
            x.dtype,
            x.shape[1],
            rows.sizes,
            rows.batch,
            len(dys),
            tables=engines.tables(comm, engine),
        )
        if engine == "triton":
            return triton(comm, x, dys, rows, signature, dtype, engines.transport(choice, transport))
        sibling = {"collective": collective, "chunked": chunked}[engine]
        return sibling(comm, x, dys, rows, signature, dtype)
