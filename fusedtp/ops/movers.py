"""Shards moved without a matmul: all-gather, reduce-scatter and all-reduce over the common workspace.

`chunked` reads peers' shards where they lie; `collective` is the process group's own. Both serve on their own
(embedding, loss, full logits) and as parts of the fused operations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedtp.comm import Communicator, Signature
from fusedtp.comm.communicator import copied

from . import engines
from .local import arrived_partials, partials_of, ring, shards_as_they_come, sum_in_rank_order
from .profile import record_function
from .rows import Rows, split

TWO_SHOT_BYTES = 1 << 20  # from this size on an all-reduce is a reduce-scatter and an all-gather


def _engine(comm: Communicator, rows: Rows, dtype: torch.dtype, operation: str, layer: str) -> str:
    """Movers have no Triton form; on CUDA the process group's collectives run."""
    engine = engines.choose(comm, "auto", rows, dtype).engine
    engine = "chunked" if engine == "chunked" and comm.device.type == "cpu" else "collective"
    engines.count(comm, operation, engine, layer)
    return engine


def all_gather(comm: Communicator, x: Tensor, rows: Rows, layer: str = "") -> Tensor:
    """x [local rows, N] -> a new [rows.total, N]."""
    if comm.world_size == 1:
        return copied(x)
    engine = _engine(comm, rows, x.dtype, "all_gather", layer)
    with record_function(f"fusedtp.all_gather.{engine}"):
        if engine == "chunked":
            return gathered(comm, x, rows)
        with comm.agreed(Signature("all_gather", engine, x.dtype, x.shape[1], rows.sizes, rows.batch)):
            counts = [rows.local(p) for p in range(comm.world_size)]
            return rows.gather(comm.all_gather(x, counts).split(counts))


def gathered(comm: Communicator, x: Tensor, rows: Rows) -> Tensor:
    """`all_gather` over the workspace, also as a part of another operation."""
    width = x.shape[1]
    signature = Signature("all_gather", "chunked", x.dtype, width, rows.sizes, rows.batch)
    out = x.new_empty(rows.total, width)
    most = max(rows.sizes) * rows.batch * width * x.element_size()
    with comm.workspace.call(signature, most) as call:
        for p, shard in shards_as_they_come(call, comm, x, rows):
            for block, part in rows.pairs(out, shard, p):
                block.copy_(part)
    return out


def reduce_scatter(comm: Communicator, x: Tensor, rows: Rows, layer: str = "") -> Tensor:
    """x [rows.total, N], a partial on every rank -> a new [local rows, N], the sum in rank order."""
    if comm.world_size == 1:
        return copied(x)
    engine = _engine(comm, rows, x.dtype, "reduce_scatter", layer)
    with record_function(f"fusedtp.reduce_scatter.{engine}"):
        if engine == "chunked":
            return scattered(comm, x, rows)
        with comm.agreed(Signature("reduce_scatter", engine, x.dtype, x.shape[1], rows.sizes, rows.batch)):
            counts = [rows.local(p) for p in range(comm.world_size)]
            return comm.reduce_scatter(rows.ordered_by_rank(x), counts)


def scattered(comm: Communicator, x: Tensor, rows: Rows) -> Tensor:
    """`reduce_scatter` over the workspace."""
    width = x.shape[1]
    signature = Signature("reduce_scatter", "chunked", x.dtype, width, rows.sizes, rows.batch)
    with comm.workspace.call(signature, rows.total * width * x.element_size()) as call:
        for p in ring(comm, own="last"):
            place = partials_of(call, comm.rank, rows, width, x.dtype, p)
            for block, part in rows.pairs(x, place, p):
                part.copy_(block)
            if p != comm.rank:
                call.publish(p)
        parts = arrived_partials(call, comm, rows, width, x.dtype)
        return sum_in_rank_order(parts)


def all_reduce(comm: Communicator, x: Tensor, layer: str = "") -> Tensor:
    """x [T, N], a partial on every rank -> a new [T, N], the sum in rank order, bitwise equal on all ranks."""
    if comm.world_size == 1:
        return copied(x)
    rows = Rows(split(x.shape[0], comm.world_size))
    engine = _engine(comm, rows, x.dtype, "all_reduce", layer)
    signature = Signature("all_reduce", engine, x.dtype, x.shape[1], rows.sizes)
    nbytes = x.numel() * x.element_size()
    with record_function(f"fusedtp.all_reduce.{engine}"):
        if engine == "collective":
            with comm.agreed(signature):
                return comm.all_reduce(x)
        if nbytes >= TWO_SHOT_BYTES:
            return gathered(comm, scattered(comm, x, rows), rows)
        with comm.workspace.call(signature, nbytes) as call:
            parts = [call.buffer(p, tuple(x.shape), x.dtype) for p in range(comm.world_size)]
            parts[comm.rank].copy_(x)
            call.handshake()
            return sum_in_rank_order(parts)
