"""y_i [T, N_i] = gather(x [T_r, K]) @ w_i [N_i, K].T + b_i: one gather for all weights.

    rank r, chunked     copy x to slot | publish | x @ w      | wait r+1 | x_{r+1} @ w | wait r+2 | ...
    rank r+1            copy x to slot | publish | x @ w      | wait r+2 | ...
                                            ^ its flag is set long before rank r asks for it

Siblings with one signature: `collective`, `chunked`, `triton`; the oracle of all is tests/properties/oracle.py.
`keep` also returns the gathered rows, copied out of the workspace.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fusedtp.comm import Communicator, Signature
from fusedtp.comm.communicator import copied

from . import engines
from .local import linear, linear_into, shards_as_they_come
from .matmul import wide
from .profile import record_function
from .rows import Rows

Result = tuple[list[Tensor], Tensor | None]


def collective(
    comm: Communicator,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rows: Rows,
    signature: Signature,
    keep: bool,
) -> Result:
    """The process group's all_gather, then matmuls."""
    with comm.agreed(signature):
        counts = [rows.local(p) for p in range(comm.world_size)]
        full = rows.gather(comm.all_gather(x, counts).split(counts))
    return [linear(full, w, b) for w, b in zip(weights, biases, strict=True)], full if keep else None


def chunked(
    comm: Communicator,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rows: Rows,
    signature: Signature,
    keep: bool,
) -> Result:
    """Matmul by matmul as shards are ready, own rows first; peers' shards are read in their memory."""
    width = x.shape[1]
    outs = [x.new_empty(rows.total, w.shape[0]) for w in weights]
    full = x.new_empty(rows.total, width) if keep else None
    weights = [wide(w) for w in weights]
    most = max(rows.sizes) * rows.batch * width * x.element_size()
    with comm.workspace.call(signature, most) as call:
        for p, shard in shards_as_they_come(call, comm, x, rows):
            with comm.span(f"matmul {p}"):
                for out, w, b in zip(outs, weights, biases, strict=True):
                    for block, part in rows.pairs(out, shard, p):
                        linear_into(block, part, w, b)
            if full is not None:
                for block, part in rows.pairs(full, shard, p):
                    block.copy_(part)
    return outs, full


def triton(
    comm: Communicator,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rows: Rows,
    signature: Signature,
    keep: bool,
    transport: str = "programs",
) -> Result:
    """One launch: programs push x to all peers, or copies bring it, and the others multiply what has come."""
    from . import launch

    with comm.workspace.call(signature, launch.all_gather_bytes(rows, x.shape[1], x.dtype)) as call:
        copies = call.copies() if transport == "copy" else None
        with call.device_view() as view:
            at, sig = (view, comm.rank, comm.world_size), signature.hash32()
            return launch.all_gather_matmul(*at, x, weights, biases, rows, sig, keep, copies=copies)


def run(
    comm: Communicator,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    rows: Rows,
    engine: str,
    needs_grad: int = 0,
    keep: bool = False,
    layer: str = "",
    transport: str | None = None,
) -> Result:
    """x [rows.local(rank), K], w_i [N_i, K] -> ([rows.total, N_i], gathered x or None). No autograd.

    transport: of `triton`, "programs" or "copy" where copies can; None as `engines.choose` says.
    """
    choice = engines.choose(comm, engine, rows, x.dtype, "all_gather_matmul", x.shape[1])
    engine = choice.engine
    engines.count(comm, "all_gather_matmul", engine, layer)
    with record_function(f"fusedtp.all_gather_matmul.{engine}"):
        if engine == "local":
            outs = [linear(x, w, b) for w, b in zip(weights, biases, strict=True)]
            return outs, copied(x) if keep else None
        signature = Signature(
            "all_gather_matmul",
            engine,
            x.dtype,
            x.shape[1],
            rows.sizes,
            rows.batch,
            len(weights),
            needs_grad,
            tables=engines.tables(comm, engine),
        )
        if engine == "triton":
            by = engines.transport(choice, transport)
            return triton(comm, x, weights, biases, rows, signature, keep, by)
        sibling = {"collective": collective, "chunked": chunked}[engine]
        return sibling(comm, x, weights, biases, rows, signature, keep)
