"""y [T_r, N] = the rows of this rank of sum over ranks of (sum_j x_j [T, K_j] @ w_j [N, K_j].T), plus bias once.

    rank r, chunked     x[r+1] @ w | publish to r+1 | x[r+2] @ w | publish | ... | x[r] @ w | wait all | sum
                        each owner's rows are finished while those of the next are computed; its own come last

Partials travel in the working dtype and are summed in rank order, in fp32 for 16-bit types, and rounded once, so a
result does not depend on who came first. Siblings: `collective`, `chunked`, `triton`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusedtp.comm import Communicator, Signature

from . import engines
from .local import arrived_partials, joined, partials_of, ring, sum_in_rank_order, sum_linear_into
from .matmul import wide
from .profile import record_function
from .rows import Rows


def collective(
    comm: Communicator,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    rows: Rows,
    signature: Signature,
) -> Tensor:
    """Matmul, then the process group's reduce_scatter."""
    partial = xs[0].new_empty(rows.total, weights[0].shape[0])
    sum_linear_into(partial, xs, weights)
    with comm.agreed(signature):
        counts = [rows.local(p) for p in range(comm.world_size)]
        return comm.reduce_scatter(rows.ordered_by_rank(partial), counts, bias)


def chunked(
    comm: Communicator,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    rows: Rows,
    signature: Signature,
) -> Tensor:
    """One matmul an owner, the next rank's rows first; owners read the partials in their peers' memory."""
    width, dtype = weights[0].shape[0], xs[0].dtype
    weights = [wide(w) for w in weights]
    with comm.workspace.call(signature, rows.total * width * dtype.itemsize) as call:
        for p in ring(comm, own="last"):
            place = partials_of(call, comm.rank, rows, width, dtype, p)
            with comm.span(f"matmul {p}"):
                for b in range(rows.batch):
                    begin = b * rows.length + rows.offset(p)
                    blocks = [x[begin : begin + rows.sizes[p]] for x in xs]
                    sum_linear_into(place[b * rows.sizes[p] : (b + 1) * rows.sizes[p]], blocks, weights)
            if p != comm.rank:
                call.publish(p)
        parts = arrived_partials(call, comm, rows, width, dtype)
        with comm.span("sum"):
            return sum_in_rank_order(parts, bias)


def triton(
    comm: Communicator,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    rows: Rows,
    signature: Signature,
) -> Tensor:
    """One launch: tiles are pushed to their owner, whose last programs sum them.

    An owner's slot holds a partial of its rows from every rank at once, so that no sender waits for room. With rows
    that are not split evenly this is more than the scattered tensor: Note [Slot bytes] in comm/workspace.py.
    """
    from . import launch

    x = torch.cat(list(xs), 1) if len(xs) > 1 else xs[0]
    weight = torch.cat(list(weights), 1) if len(weights) > 1 else weights[0]
    nbytes = launch.reduce_scatter_bytes(rows, weight.shape[0], x.dtype)
    with comm.workspace.call(signature, nbytes) as call, call.device_view() as view:
        y = launch.matmul_reduce_scatter(
            view, comm.rank, comm.world_size, x, weight, bias, rows, signature.hash32()
        )
    return y


def run(
    comm: Communicator,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: Tensor | None,
    rows: Rows,
    engine: str,
    needs_grad: int = 0,
    layer: str = "",
) -> Tensor:
    """x_j [rows.total, K_j], w_j [N, K_j] -> [rows.local(rank), N]. No autograd."""
    width = weights[0].shape[0]
    engine = engines.choose(comm, engine, rows, xs[0].dtype, "matmul_reduce_scatter", width).engine
    engines.count(comm, "matmul_reduce_scatter", engine, layer)
    with record_function(f"fusedtp.matmul_reduce_scatter.{engine}"):
        xs, weights = joined(xs, weights)
        if engine == "local":
            y = xs[0].new_empty(rows.total, width)
            sum_linear_into(y, xs, weights)
            return y if bias is None else y.add_(bias)
        signature = Signature(
            "matmul_reduce_scatter",
            engine,
            xs[0].dtype,
            width,
            rows.sizes,
            rows.batch,
            len(weights),
            needs_grad,
            int(bias is not None),
            engines.tables(comm, engine),
        )
        sibling = {"collective": collective, "chunked": chunked, "triton": triton}[engine]
        return sibling(comm, xs, weights, bias, rows, signature)
