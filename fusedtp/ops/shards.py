"""Exchange of shards without a matmul: building blocks of the `chunked` engines, and operations made of them.

    all_gather_rows          x [T_r, N] -> [T, N]
    all_gather_tensors       the same for several x, of any widths and dtypes
    reduce_scatter_rows      x [T, N], a partial on every rank -> [T_r, N], the sum in rank order
    reduce_scatter_tensors   the same for several x, of any widths and dtypes
    all_reduce_rows          x [T, N], a partial on every rank -> [T, N], bitwise equal on all ranks

On a CPU ranks read each other's shards in place; on GPUs these are the process group's own collectives. The
differentiable functions of tokens.py use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fusedtp.comm import Call, Communicator, Signature
from fusedtp.comm.communicator import copied
from fusedtp.comm.memory import round_up

from .matmul import sum_in_rank_order
from .operation import Operation, Plan, Shared, Spec
from .rows import Rows

ALIGNED = 64  # bytes: alignment of tensors that share a slot
TWO_SHOT_BYTES = 1 << 20  # from this size on an all-reduce is a reduce-scatter and an all-gather


def ring(comm: Communicator, *, own: str) -> list[int]:
    """Ranks in ascending order from this one, cyclically; `own`: whether this rank comes "first" or "last"."""
    w, r = comm.world_size, comm.rank
    others = [(r + step) % w for step in range(1, w)]
    return [r, *others] if own == "first" else [*others, r]


def as_they_arrive(call: Call, comm: Communicator) -> Iterator[int]:
    """Yield every rank as soon as its rows can be read, this one first."""
    for p in ring(comm, own="first"):
        if p != comm.rank:
            with comm.span(f"wait {p}"):
                call.wait(p)
        yield p


def shards_as_they_arrive(call: Call, comm: Communicator, x: Tensor, rows: Rows) -> Iterator[tuple[int, Tensor]]:
    """Publish x [rows.local(rank), K], then yield (rank, its rows) for every rank, this one first.

    On CPU a peer's rows are a view of its slot. On CUDA the copy engine fetches them: all copies start at once on a
    side stream, and the current stream waits for each just before it is yielded.
    """
    width = x.shape[1]
    views = [call.buffer(p, (rows.local(p), width), x.dtype) for p in range(comm.world_size)]
    views[comm.rank].copy_(x)
    call.publish_all()
    copies = None if call.on_cpu else CopyStream(x.device)
    fetched = {p: copies.fetch(views[p]) for p in comm.workspace.peers} if copies else {}
    for p in as_they_arrive(call, comm):
        if p == comm.rank:
            yield p, x
        else:
            yield p, fetched[p]() if copies else views[p]


def partials_of(call: Call, source: int, rows: Rows, width: int, dtype: torch.dtype, owner: int, at: int = 0) -> Tensor:
    """The partial of rank `source` for the rows of `owner` in a reduce-scatter, [rows.local(owner), width].

    at   byte offset in the slot at which the partials of all owners begin
    """
    offset = at + rows.batch * rows.offset(owner) * width * dtype.itemsize
    return call.buffer(source, (rows.local(owner), width), dtype, offset)


def arrived_partials(call: Call, comm: Communicator, rows: Rows, width: int, dtype: torch.dtype) -> list[Tensor]:
    """After every rank's `publish`: the partials of this rank's rows, in rank order."""
    (parts,) = _arrived(call, comm, rows, [(width, dtype, 0)])
    return parts


def _arrived(
    call: Call, comm: Communicator, rows: Rows, tensors: Sequence[tuple[int, torch.dtype, int]]
) -> list[list[Tensor]]:
    """The same for several tensors, each given by its width, its dtype and its byte offset."""
    found: list[list[Tensor]] = [[] for _ in tensors]
    for p in range(comm.world_size):
        if p != comm.rank:
            with comm.span(f"wait {p}"):
                call.wait(p)
        for parts, (width, dtype, at) in zip(found, tensors, strict=True):
            part = partials_of(call, p, rows, width, dtype, comm.rank, at)
            parts.append(part if call.on_cpu or p == comm.rank else part.clone())  # CUDA: read it once over the link
    return found


class CopyStream:
    """Copies on a side stream, by the copy engine."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def fetch(self, source: Tensor) -> Callable[[], Tensor]:
        """Start copying `source`. The returned function makes the current stream wait for the copy and returns it."""
        out = torch.empty_like(source)
        out.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            out.copy_(source, non_blocking=True)
            done = self.stream.record_event()

        def ready() -> Tensor:
            torch.cuda.current_stream(source.device).wait_event(done)
            return out

        return ready


# -- chunked; other operations use these too -------------------------------------------------------------------------


def gather_rows(comm: Communicator, x: Tensor, rows: Rows) -> Tensor:
    """x [local rows, N] -> a new [rows.total, N] through the workspace."""
    width = x.shape[1]
    signature = Signature("all_gather_rows", "chunked", x.dtype, width, rows.sizes, rows.batch)
    out = x.new_empty(rows.total, width)
    with comm.workspace.call(signature, rows.longest * width * x.element_size()) as call:
        for p, shard in shards_as_they_arrive(call, comm, x, rows):
            rows.put(out, shard, p)
    return out


def gather_tensors(plan: Plan, xs: Sequence[Tensor]) -> list[Tensor]:
    """Each x [local rows, N] -> a new [rows.total, N], all in one call."""
    rows, comm = plan.rows, plan.comm
    outs, at = [], 0
    with plan.call() as call:
        shards: list[list[Tensor]] = []
        for x in xs:
            shapes = [(rows.local(p), x.shape[1]) for p in range(comm.world_size)]
            shards.append([call.buffer(p, shape, x.dtype, at) for p, shape in enumerate(shapes)])
            shards[-1][comm.rank].copy_(x)
            at += round_up(rows.longest * x.shape[1] * x.element_size(), ALIGNED)
            outs.append(x.new_empty(rows.total, x.shape[1]))
        call.publish_all()
        for p in as_they_arrive(call, comm):
            for x, out, of_x in zip(xs, outs, shards, strict=True):
                rows.put(out, x if p == comm.rank else of_x[p], p)
    return outs


def scatter_rows(comm: Communicator, x: Tensor, rows: Rows) -> Tensor:
    """x [rows.total, N], a partial on every rank -> a new [local rows, N] through the workspace."""
    width = x.shape[1]
    signature = Signature("reduce_scatter_rows", "chunked", x.dtype, width, rows.sizes, rows.batch)
    with comm.workspace.call(signature, rows.total * width * x.element_size()) as call:
        (out,) = _scattered(call, comm, [x], rows)
        return out


def _scattered(call: Call, comm: Communicator, xs: Sequence[Tensor], rows: Rows) -> list[Tensor]:
    """Each x [rows.total, N] -> a new [local rows, N]; in a slot they follow one another."""
    tensors, at = [], 0
    for x in xs:
        tensors.append((x.shape[1], x.dtype, at))
        at += round_up(rows.total * x.shape[1] * x.element_size(), ALIGNED)
    for p in comm.workspace.peers:
        for x, (width, dtype, at) in zip(xs, tensors, strict=True):
            slot = partials_of(call, comm.rank, rows, width, dtype, p, at)
            for block, part in rows.pairs(x, slot, p):
                part.copy_(block)
        call.publish(p)
    outs = []
    for x, partials in zip(xs, _arrived(call, comm, rows, tensors), strict=True):
        own = rows.blocks(x, comm.rank)  # not in the slot, because no peer reads it
        partials[comm.rank] = own[0] if len(own) == 1 else torch.cat(list(own))
        outs.append(sum_in_rank_order(partials))
    return outs


def scatter_tensors(plan: Plan, xs: Sequence[Tensor]) -> list[Tensor]:
    """Each x [rows.total, N], a partial on every rank -> a new [local rows, N], all in one call."""
    with plan.call() as call:
        return _scattered(call, plan.comm, xs, plan.rows)


def _reduce_rows(plan: Plan, x: Tensor) -> Tensor:
    comm = plan.comm
    if plan.slot_bytes >= TWO_SHOT_BYTES:
        return gather_rows(comm, scatter_rows(comm, x, plan.rows), plan.rows)
    with plan.call() as call:
        parts = [call.buffer(p, tuple(x.shape), x.dtype) for p in range(comm.world_size)]
        parts[comm.rank].copy_(x)
        call.publish_and_wait()
        return sum_in_rank_order(parts)


# -- collective; other operations use these too ------------------------------------------------------------------------


def gathered(plan: Plan, x: Tensor) -> Tensor:
    """The process group's all_gather: x [local rows, N] -> [rows.total, N]."""
    rows, comm = plan.rows, plan.comm
    with comm.agreed(plan.signature):
        counts = [rows.local(p) for p in range(comm.world_size)]
        return rows.gather(comm.all_gather(x, counts).split(counts))


def scattered(plan: Plan, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The process group's reduce_scatter: x [rows.total, N], a partial on every rank -> [local rows, N], plus bias."""
    rows, comm = plan.rows, plan.comm
    with comm.agreed(plan.signature):
        return comm.reduce_scatter(rows.ordered_by_rank(x), [rows.local(p) for p in range(comm.world_size)], bias)


def _all_reduce(plan: Plan, x: Tensor) -> Tensor:
    with plan.comm.agreed(plan.signature):
        return plan.comm.all_reduce(x)


def _local(plan: Plan, x: Tensor) -> Tensor:
    return copied(x)


def _shared(x: Tensor) -> Shared:
    return Shared(x.dtype, x.shape[1])


def _of_several(
    name: str,
    made: Callable[[Spec], int],
    *,
    collective: Callable[[Plan, Tensor], Tensor],
    chunked: Callable[[Plan, Sequence[Tensor]], list[Tensor]],
    rows_in_slot: Callable[[Rows], int],
) -> Operation:
    """An operation on several tensors of any widths and dtypes, in one call.

    made           number of rows of a result
    collective     handles one tensor; called for one after another
    rows_in_slot   rows of each tensor in a rank's slot
    """
    return Operation(
        name,
        "Tensor[] xs",
        "Tensor[]",
        fake=lambda spec, xs: [x.new_empty(made(spec), x.shape[1]) for x in xs],
        shared=lambda xs: Shared(torch.uint8, sum(x.shape[1] * x.element_size() for x in xs), len(xs)),
        engines=dict(
            local=lambda plan, xs: [copied(x) for x in xs],
            collective=lambda plan, xs: [collective(plan, x) for x in xs],
            chunked=chunked,
        ),
        slot_bytes=dict(chunked=lambda rows, shared: rows_in_slot(rows) * shared.features + ALIGNED * shared.weights),
    )


all_gather_rows = Operation(
    "all_gather_rows",
    "Tensor x",
    "Tensor",
    fake=lambda spec, x: x.new_empty(spec.batch * sum(spec.sizes), x.shape[1]),
    shared=_shared,
    engines=dict(local=_local, collective=gathered, chunked=lambda plan, x: gather_rows(plan.comm, x, plan.rows)),
    slot_bytes=dict(chunked=lambda rows, shared: rows.longest * shared.features * shared.dtype.itemsize),
)

reduce_scatter_rows = Operation(
    "reduce_scatter_rows",
    "Tensor x",
    "Tensor",
    fake=lambda spec, x: x.new_empty(spec.batch * spec.sizes[spec.rank], x.shape[1]),
    shared=_shared,
    engines=dict(
        local=_local,
        collective=scattered,
        chunked=lambda plan, x: scatter_rows(plan.comm, x, plan.rows),
    ),
    slot_bytes=dict(chunked=lambda rows, shared: rows.total * shared.features * shared.dtype.itemsize),
)

all_gather_tensors = _of_several(
    "all_gather_tensors",
    lambda spec: spec.batch * sum(spec.sizes),
    collective=gathered,
    chunked=gather_tensors,
    rows_in_slot=lambda rows: rows.longest,
)

reduce_scatter_tensors = _of_several(
    "reduce_scatter_tensors",
    lambda spec: spec.batch * spec.sizes[spec.rank],
    collective=scattered,
    chunked=scatter_tensors,
    rows_in_slot=lambda rows: rows.total,
)

all_reduce_rows = Operation(
    "all_reduce_rows",
    "Tensor x",
    "Tensor",
    fake=lambda spec, x: torch.empty_like(x, memory_format=torch.contiguous_format),
    shared=_shared,
    engines=dict(local=_local, collective=_all_reduce, chunked=_reduce_rows),
    slot_bytes=dict(chunked=lambda rows, shared: rows.total * shared.features * shared.dtype.itemsize),
)
