"""y [T, N] = sum over ranks of x [T, K] @ w [N, K].T, plus bias once; the same bits on all ranks.

Small results are exchanged whole (one-shot: every rank sums all partials); large ones are reduce-scattered and
gathered (two-shot). Siblings: `collective`, `chunked`, `triton`.
"""

from __future__ import annotations

from torch import Tensor

from fusedtp.comm import Communicator, Signature

from . import engines, movers
from . import matmul_reduce_scatter as scatter
from .local import linear, linear_into, sum_in_rank_order
from .profile import record_function
from .rows import Rows, split


def collective(
    comm: Communicator, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, signature: Signature
) -> Tensor:
    """Matmul, then the process group's all_reduce."""
    partial = linear(x, weight)
    with comm.agreed(signature):
        return comm.all_reduce(partial, bias)


def chunked(
    comm: Communicator, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, signature: Signature
) -> Tensor:
    """One-shot through the workspace, or `matmul_reduce_scatter` and an all-gather."""
    nbytes = rows.total * weight.shape[0] * x.element_size()
    if nbytes >= movers.TWO_SHOT_BYTES:
        return movers.gathered(comm, scatter.chunked(comm, [x], [weight], bias, rows, signature), rows)
    with comm.workspace.call(signature, nbytes) as call:
        parts = [call.buffer(p, (rows.total, weight.shape[0]), x.dtype) for p in range(comm.world_size)]
        linear_into(parts[comm.rank], x, weight, None)
        call.handshake()
        return sum_in_rank_order(parts, bias)


def triton(
    comm: Communicator, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows, signature: Signature
) -> Tensor:
    """One launch, one-shot or two-shot by size."""
    from . import launch

    nbytes = launch.matmul_all_reduce_bytes(rows.total, weight.shape[0], comm.world_size, x.dtype)
    with comm.workspace.call(signature, nbytes) as call, call.device_view() as view:
        y = launch.matmul_all_reduce(view, comm.rank, comm.world_size, x, weight, bias, signature.hash32())
    return y


def run(
    comm: Communicator,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    engine: str,
    needs_grad: int = 0,
    layer: str = "",
) -> Tensor:
    """x [T, K], w [N, K] -> [T, N]. No autograd."""
    rows = Rows(split(x.shape[0], comm.world_size))
    engine = engines.choose(comm, engine, rows, x.dtype, "matmul_all_reduce", weight.shape[0]).engine
    engines.count(comm, "matmul_all_reduce", engine, layer)
    with record_function(f"fusedtp.matmul_all_reduce.{engine}"):
        if engine == "local":
            return linear(x, weight, bias)
        signature = Signature(
            "matmul_all_reduce",
            engine,
            x.dtype,
            weight.shape[0],
            rows.sizes,
            1,
            1,
            needs_grad,
            int(bias is not None),
            engines.tables(comm, engine),
        )
        sibling = {"collective": collective, "chunked": chunked, "triton": triton}[engine]
        return sibling(comm, x, weight, bias, rows, signature)
