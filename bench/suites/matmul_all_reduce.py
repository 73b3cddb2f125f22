"""matmul_all_reduce: x [T, K] times w [N, K].T on every rank, summed, all rows on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fusedtp
from fusedtp.ops.rows import Rows, split
from fusedtp.ops.shards import gather_rows, scatter_rows

from .. import errors
from ..options import Plan
from ..rank import Rank
from ..rows import Row
from . import parallel
from .common import Case, layer_cases, matmul
from .matmul_reduce_scatter import operands_of, summed

NAME, RANKS = "matmul-all-reduce", "several"


def cases(plan: Plan, tp: int) -> list[Case]:
    """Row-parallel layers."""
    return layer_cases(plan, tp, "row")


def measure(rank: Rank, case: Case) -> list[Row]:
    """Rows of one case. Collective."""
    group, comm, world_size = rank.group, rank.comm, rank.world_size
    assert comm is not None
    rows = Rows(split(case.tokens, world_size))
    partial = rank.randn(case.tokens, case.n, dtype=case.dtype, seed=99)
    operands = operands_of(rank, case)

    def ours(engine: str, x: Tensor, w: Tensor) -> Tensor:
        return fusedtp.matmul_all_reduce(x, w, group, engine=engine)

    def by_hand(hand: Any) -> tuple[parallel.Function, parallel.Function]:
        return lambda x, w: hand.all_reduce(partial), lambda x, w: hand.all_reduce(matmul(x, w))

    sampled, want = summed(rank, case, operands)

    def error(y: Tensor, is_ours: bool) -> errors.Error:
        roundings = 1 if is_ours else world_size
        found = errors.compare(y[sampled.to(y.device)], want, case.k, world_size, roundings)
        return errors.Error(*rank.worst(*found))

    with torch.no_grad():
        return parallel.measure(
            rank, NAME, case,
            parallel.Parts(
                operands=operands,
                local=matmul,
                alone=lambda x, w: gather_rows(comm, scatter_rows(comm, partial, rows), rows),
                ours=ours,
                by_hand=by_hand,
                fused=lambda library, group: None,
                error=error,
                # What a reduce-scatter and an all-gather move, the least of any all-reduce without a switch's help.
                moved=2 * (world_size - 1) * case.tokens * case.n * case.itemsize,
            ),
        )  # fmt: skip
