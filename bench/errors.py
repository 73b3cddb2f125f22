"""The error of a result, and the error that its dtype allows.

Let u be the unit roundoff of the dtype, and v that of fp32, in which every engine accumulates. An entry of a matmul
with K terms over W ranks may be off by

    u (sum_r |p_r| + |y|) + (K + W + 2) v sum_k |x_k w_k|        p_r: rank r's part, rounded before it is sent

The result of one rank has no p_r. A baseline that sums in its own dtype rounds after every addition. `share` is the
largest error as a share of this bound. The reference is computed in fp64, on at most ROWS rows spread over all rows.

`peak_bytes` is the memory that a call allocates.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from .rank import Rank
from .sample import Way

ROWS = 32


class Error(NamedTuple):
    """The largest absolute error, and the largest error as a share of the bound."""

    largest: float
    share: float


def sampled(total: int) -> Tensor:
    """At most ROWS row numbers in [0, total), evenly spread, including the first and the last."""
    return torch.linspace(0, total - 1, min(ROWS, total), dtype=torch.float64).round().long().unique()


def unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


class Reference(NamedTuple):
    """[rows, N] in fp64: the exact product, the sum of absolute values of its terms, and of its parts (or None)."""

    y: Tensor
    terms: Tensor
    parts: Tensor | None


def product(x: Tensor, w: Tensor, rows: Tensor) -> Reference:
    """The reference of one rank: x [T, K] at `rows`, w [N, K]."""
    some, weight = x[rows.to(x.device)].double(), w.double()
    return Reference(some @ weight.t(), some.abs() @ weight.abs().t(), None)


def gated(both: Reference) -> Reference:
    """The reference of silu(g) * u from that of [g, u]. The slope of silu is at most 1.1, its value at most |g|.

    g and u may each be rounded first: those roundings are the parts.
    """
    (g, u), (of_g, of_u) = both.y.chunk(2, 1), both.terms.chunk(2, 1)
    size = 1.1 * (g * u).abs()
    return Reference(F.silu(g) * u, 1.1 * of_g * u.abs() + g.abs() * of_u, 2 * size)


def compare(got: Tensor, want: Reference, k: int, ranks: int = 1, roundings: int = 1) -> Error:
    """Compare got [rows, N] with the reference. roundings: roundings of a sum of parts in its dtype."""
    if not got.numel():
        return Error(0.0, 0.0)
    u, v = unit(got.dtype), unit(torch.float32)
    allowed = u * want.y.abs() + (k + ranks + 2) * v * want.terms
    if want.parts is not None:
        allowed = allowed + roundings * u * want.parts
    error = (got.double() - want.y).abs()
    if not bool(error.isfinite().all()):
        return Error(float("inf"), float("inf"))
    return Error(float(error.max()), float((error / allowed.clamp(min=torch.finfo(torch.float64).tiny)).max()))


def elementwise(got: Tensor, want: Tensor, magnitude: Tensor, terms: int, roundings: int = 1) -> Error:
    """Compare got with fp64 values; allows `terms` fp32 operations on values of `magnitude`, then rounding."""
    rounded = (1 + unit(got.dtype)) ** roundings - 1
    allowed = rounded * want.abs() + terms * unit(torch.float32) * magnitude
    error = (got.double() - want).abs()
    if not bool(error.isfinite().all()):
        return Error(float("inf"), float("inf"))
    return Error(float(error.max()), float((error / allowed.clamp(min=torch.finfo(torch.float64).tiny)).max()))


# -- memory -----------------------------------------------------------------------------------------------------------


def peak_bytes(rank: Rank, way: Way) -> int | None:
    """Peak memory of the rank that needs most. Collective.

    GPU   as counted by torch's caching allocator. Ranks of a virtual world share one allocator: their joint peak
          divided by their number
    CPU   from the allocations and frees in torch's profiler; None in a virtual world, whose ranks it cannot tell apart
    """
    way()  # compiles, connects and grows workspaces
    if rank.device.type != "cuda":
        return None if rank.world == "virtual" else int(rank.worst(float(_profiled(way)))[0])
    torch.cuda.synchronize(rank.device)
    rank.meeting.barrier()
    if rank.rank == 0 or rank.world != "virtual":
        torch.cuda.reset_peak_memory_stats(rank.device)
    before = torch.cuda.memory_allocated(rank.device)
    rank.meeting.barrier()
    way()
    torch.cuda.synchronize(rank.device)
    rank.meeting.barrier()
    peak = torch.cuda.max_memory_allocated(rank.device) - before
    return int(rank.worst(float(peak))[0]) // (rank.world_size if rank.world == "virtual" else 1)


def _profiled(way: Way) -> int:
    """The largest amount of memory that was allocated and not yet freed."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # below 6, torch 2.13 logs every profile to stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        way()
    events = found.profiler.kineto_results.events()
    held = most = 0
    for _, nbytes in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"):
        held += nbytes
        most = max(most, held)
    return most
