"""matmul_reduce_scatter: x [T, K] times w [N, K].T on every rank, summed, each rank keeping its rows [T_r, N]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fusedtp
from fusedtp.ops.rows import Rows, split
from fusedtp.ops.shards import scatter_rows

from .. import arrived, errors
from ..options import Plan
from ..rank import Rank
from ..rows import Row
from . import parallel
from .common import Case, even, layer_cases, matmul

NAME, RANKS = "matmul-reduce-scatter", "several"


def cases(plan: Plan, tp: int) -> list[Case]:
    """Row-parallel layers; Raises ValueError for tokens that do not split evenly."""
    return even(layer_cases(plan, tp, "row"), NAME)


def operands_of(rank: Rank, case: Case) -> Any:
    """seed -> x [T, K] and w [N, K] of this rank, such that the sum over ranks is of the size of one."""

    def operands(seed: int) -> tuple[Tensor, ...]:
        x = rank.randn(case.tokens, case.k, dtype=case.dtype, seed=2 * seed)
        scale = (case.k * case.tp) ** -0.5
        return x, rank.randn(case.n, case.k, dtype=case.dtype, seed=2 * seed + 1, scale=scale)

    return operands


def summed(rank: Rank, case: Case, operands: Any) -> tuple[Tensor, errors.Reference]:
    """Some rows, and there the product of operands(0), summed over ranks. Collective."""
    assert rank.comm is not None
    sampled = errors.sampled(case.tokens)
    x, w = operands(0)
    part = errors.product(x, w, sampled)
    total, terms, parts = (rank.comm.all_reduce(t) for t in (part.y, part.terms, part.y.abs()))
    return sampled, errors.Reference(total, terms, parts)


def measure(rank: Rank, case: Case) -> list[Row]:
    """Rows of one case. Collective."""
    group, comm, world_size = rank.group, rank.comm, rank.world_size
    assert comm is not None
    rows, mine = Rows(split(case.tokens, world_size)), case.tokens // world_size
    partial = rank.randn(case.tokens, case.n, dtype=case.dtype, seed=99)
    operands = operands_of(rank, case)

    def ours(engine: str, x: Tensor, w: Tensor) -> Tensor:
        return fusedtp.matmul_reduce_scatter(x, w, group, engine=engine)

    def by_hand(hand: Any) -> tuple[parallel.Function, parallel.Function]:
        return lambda x, w: hand.reduce_scatter(partial), lambda x, w: hand.reduce_scatter(matmul(x, w))

    def fused(library: Any, group: Any) -> parallel.Function:
        return lambda x, w: library.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, group.group_name)

    sampled, want = summed(rank, case, operands)
    begin = rank.rank * mine
    own = (sampled >= begin) & (sampled < begin + mine)
    local = sampled[own] - begin
    own_want = errors.Reference(*(None if t is None else t[own.to(t.device)] for t in want))  # type: ignore[arg-type]

    def error(y: Tensor, is_ours: bool) -> errors.Error:
        some = y[local.to(y.device)]
        # Ours sums in fp32; a collective may round after each addition, in its own order.
        roundings = 1 if is_ours else world_size
        return errors.Error(*rank.worst(*errors.compare(some, own_want, case.k, world_size, roundings)))

    def there() -> tuple[arrived.Pair, parallel.LocalError]:
        x, w = operands(0)
        parts = rank.randn(world_size, mine, case.n, dtype=case.dtype, seed=98)
        others = torch.cat([parts[: rank.rank], parts[rank.rank + 1 :]])[:, local.to(x.device)].double()
        part = errors.product(x, w, sampled[own])
        total = errors.Reference(part.y + others.sum(0), part.terms + others.abs().sum(0), part.y.abs())

        def local_error(y: Tensor) -> errors.Error:
            return errors.compare(y[local.to(y.device)], total, case.k, world_size)

        return arrived.scatter(rank.rank, rows, parts, x, w), local_error

    with torch.no_grad():
        return parallel.measure(
            rank, NAME, case,
            parallel.Parts(
                operands=operands,
                local=matmul,
                alone=lambda x, w: scatter_rows(comm, partial, rows),
                ours=ours,
                by_hand=by_hand,
                fused=fused,
                error=error,
                there=there,
                moved=(world_size - 1) * case.tokens * case.n * case.itemsize,
            ),
        )  # fmt: skip
