"""One call of an operation on random operands, as `tune` and `crossover` sample it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

import fusedtp
from fusedtp.ops.launch import plain
from fusedtp.ops.rows import split

from .trial import Rank

Operands = Callable[[], tuple[Tensor, Tensor]]


def operands(rank: Rank, operation: str, dtype: str, tokens: int, n: int, k: int) -> Operands:
    """x and w (of a wgrad: x and dy) of this rank, another set at each call; N and K of the weight as it has it."""
    gathers = operation.startswith("all_gather")
    rows = split(tokens, rank.world_size)[rank.rank] if gathers else tokens
    other = (tokens, n) if operation == "all_gather_wgrad" else (n, k)

    def make(i: int) -> tuple[Tensor, Tensor]:
        return rank.randn(2 * i, dtype, rows, k), rank.randn(2 * i + 1, dtype, *other)

    return rank.sets(make)


def call(rank: Rank, operation: str, engine: str, tokens: int, x: Tensor, w: Tensor) -> object:
    """Run it. "matmul" is the library's own plain kernel, whatever the engine."""
    sizes = split(tokens, rank.world_size)
    if operation == "matmul":
        return plain.matmul(x, w)
    if operation == "all_gather_matmul":
        return fusedtp.all_gather_matmul(x, [w], rank.group, sizes=sizes, engine=engine)
    if operation == "all_gather_wgrad":
        return fusedtp.all_gather_wgrad(x, [w], rank.group, sizes=sizes, engine=engine)
    if operation == "matmul_reduce_scatter":
        return fusedtp.matmul_reduce_scatter(x, w, rank.group, engine=engine)
    return fusedtp.matmul_all_reduce(x, w, rank.group, engine=engine)
