"""all_gather_matmul: x [T_r, K] of every rank gathered, times this rank's w [N, K].T."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import fusedtp
from fusedtp.ops.rows import Rows, split
from fusedtp.ops.shards import gather_rows

from .. import arrived, errors
from ..options import Plan
from ..rank import Rank
from ..rows import Row
from . import parallel
from .common import Case, even, layer_cases, matmul

NAME, RANKS = "all-gather-matmul", "several"


def cases(plan: Plan, tp: int) -> list[Case]:
    """Column-parallel layers; Raises ValueError for tokens that do not split evenly."""
    return even(layer_cases(plan, tp, "column"), NAME)


def measure(rank: Rank, case: Case) -> list[Row]:
    """Rows of one case. Collective."""
    group, comm, world_size = rank.group, rank.comm, rank.world_size
    assert comm is not None
    rows, mine = Rows(split(case.tokens, world_size)), case.tokens // world_size

    def operands(seed: int) -> tuple[Tensor, ...]:
        x = rank.randn(mine, case.k, dtype=case.dtype, seed=2 * seed)
        return x, rank.randn(case.n, case.k, dtype=case.dtype, seed=2 * seed + 1, scale=case.k**-0.5)

    def ours(engine: str, x: Tensor, w: Tensor) -> Tensor:
        return fusedtp.all_gather_matmul(x, [w], group, engine=engine)[0]

    def by_hand(hand: Any) -> tuple[parallel.Function, parallel.Function]:
        return lambda x, w: hand.gather(x), lambda x, w: matmul(hand.gather(x), w)

    def fused(library: Any, group: Any) -> parallel.Function:
        return lambda x, w: library.fused_all_gather_matmul(x, [w.t()], 0, group.group_name)[1][0]

    x, w = operands(0)
    full = gather_rows(comm, x, rows)
    sampled = errors.sampled(case.tokens)
    want = errors.product(full, w, sampled)
    del x, w

    def local_error(y: Tensor) -> errors.Error:
        return errors.compare(y[sampled.to(y.device)], want, case.k)

    def error(y: Tensor, _is_ours: bool) -> errors.Error:
        return errors.Error(*rank.worst(*local_error(y)))

    def there() -> tuple[arrived.Pair, parallel.LocalError]:
        return arrived.gather(rank.rank, rows, full, operands(0)[1]), local_error

    with torch.no_grad():
        return parallel.measure(
            rank, NAME, case,
            parallel.Parts(
                operands=operands,
                local=lambda x, w: matmul(full, w),
                alone=lambda x, w: gather_rows(comm, x, rows),
                ours=ours,
                by_hand=by_hand,
                fused=fused,
                error=error,
                there=there,
                moved=(world_size - 1) * case.tokens * case.k * case.itemsize,
            ),
        )  # fmt: skip
