"""Single-device pieces that the engines of several operations share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fusedtp.comm import Call, Communicator, streams

from .matmul import is_16_bit, matmul, matmul_into, widens
from .rows import Rows

_BLOCK_BYTES = 1 << 18  # of fp32 sums held at a time, so that they stay in a core's cache


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """out [M, N] = x [M, K] @ weight [N, K].T + bias, written in place."""
    matmul_into(out, [x], [weight.t()], bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K], weight [N, K] -> a new [M, N]."""
    return matmul(x, weight.t(), bias)


def joined(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Operands of sum_j xs[j] @ weights[j].T such that one partial is rounded once.

    Native 16-bit operands are concatenated along K; others accumulate in place, which copies nothing.
    """
    if len(xs) > 1 and is_16_bit(xs[0].dtype) and not widens(xs[0]):
        return [torch.cat(list(xs), 1)], [_side_by_side(weights)]
    return list(xs), list(weights)


def _side_by_side(weights: Sequence[Tensor]) -> Tensor:
    """[N, K_j] -> [N, sum of K_j], of their layout: whole rows are copied also where they are transposed."""
    if all(w.stride(0) == 1 for w in weights):
        return torch.cat([w.t() for w in weights], 0).t()
    return torch.cat(list(weights), 1)


def sum_linear_into(out: Tensor, xs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """out [M, N] = sum_j xs[j] [M, K_j] @ weights[j] [N, K_j].T, written in place."""
    matmul_into(out, xs, [w.t() for w in weights])


def sum_in_rank_order(parts: Sequence[Tensor], bias: Tensor | None = None) -> Tensor:
    """[M, N] partials of all ranks -> a new [M, N]: fp32 (fp64) sums in the order given, rounded once."""
    first = parts[0]
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    if len(parts) == 2 and (bias is None or not is_16_bit(first.dtype)):
        torch.add(parts[0], parts[1], out=out)  # 16-bit: one addition, in fp32, rounded once
        return out if bias is None else out.add_(bias)
    if not is_16_bit(first.dtype):
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return out if bias is None else out.add_(bias)
    rows = max(1, _BLOCK_BYTES // (4 * max(1, first.shape[1])))
    for begin in range(0, first.shape[0], rows):
        block = slice(begin, begin + rows)
        total = parts[0][block].float()
        for part in parts[1:]:
            total.add_(part[block])
        if bias is not None:
            total.add_(bias)
        out[block] = total
    return out


def shards_as_they_come(
    call: Call, comm: Communicator, x: Tensor, rows: Rows
) -> Iterator[tuple[int, Tensor]]:
    """Publish x [rows.local(rank), K], then yield (rank, its rows) for every rank, this one first.

    On CPU a peer's rows are a view of its slot. On CUDA the copy engine brings them, all copies started at once on a
    stream of their own, and each is waited for on the current stream just before it is yielded.
    """
    width = x.shape[1]
    views = [call.buffer(p, (rows.local(p), width), x.dtype) for p in range(comm.world_size)]
    views[comm.rank].copy_(x)
    call.publish_all()
    copies = None if call.on_cpu else CopyStream(x.device)
    order = ring(comm, own="first")
    fetched = {p: copies.fetch(views[p]) for p in order[1:]} if copies else {}
    yield comm.rank, x
    for p in order[1:]:
        with comm.span(f"wait {p}"):
            call.wait(p)
        yield p, fetched[p]() if copies else views[p]


def partials_of(call: Call, source: int, rows: Rows, width: int, dtype: torch.dtype, owner: int) -> Tensor:
    """What rank `source` holds in its slot for the rows of `owner` in a reduce-scatter, [rows.local(owner), width]."""
    offset = rows.batch * rows.offset(owner) * width * dtype.itemsize
    return call.buffer(source, (rows.local(owner), width), dtype, offset)


def arrived_partials(
    call: Call, comm: Communicator, rows: Rows, width: int, dtype: torch.dtype
) -> list[Tensor]:
    """After every rank's `publish`: the partials of this rank's rows, in rank order."""
    parts = []
    for p in range(comm.world_size):
        if p != comm.rank:
            with comm.span(f"wait {p}"):
                call.wait(p)
        part = partials_of(call, p, rows, width, dtype, comm.rank)
        parts.append(part if call.on_cpu or p == comm.rank else part.clone())  # CUDA: one pass over the link
    return parts


class CopyStream:
    """Copies that run beside the current CUDA stream, on the copy engine."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def fetch(self, source: Tensor) -> Callable[[], Tensor]:
        """Start copying `source`; the result makes the current stream wait for the copy and returns it."""
        out = torch.empty_like(source)
        out.record_stream(self.stream)
        with torch.cuda.stream(self.stream):
            streams.carry(out, source)
            done = self.stream.record_event()

        def ready() -> Tensor:
            torch.cuda.current_stream(source.device).wait_event(done)
            return out

        return ready


def ring(comm: Communicator, *, own: str) -> list[int]:
    """Ranks from this one upwards; `own` says whether this rank comes "first" or "last"."""
    w, r = comm.world_size, comm.rank
    others = [(r + step) % w for step in range(1, w)]
    return [r, *others] if own == "first" else [*others, r]
