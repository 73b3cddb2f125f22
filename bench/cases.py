"""The three ways of each benchmarked operation, on the same operands.

bare   the local matmuls on all ranks at once, no communication
gloo   the process group's collectives and the same matmuls (by_hand.py)
ours   fusedtp's operation
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import fusedtp

from .by_hand import Column, Gloo, Moves, Nothing, Row

Way = Callable[[], object]
OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter")


@dataclass(frozen=True)
class Case:
    """One row of the table: a linear layer of K inputs and N outputs on T tokens, split over the ranks.

    all_gather_matmul       x [T / W, K], w [N / W, K]
    matmul_reduce_scatter   x [T, K / W], w [N, K / W]
    """

    operation: str
    dtype: str
    tokens: int
    k: int
    n: int
    backward: bool

    @property
    def label(self) -> str:
        """One line that names this row."""
        direction = "fwd+bwd" if self.backward else "fwd"
        return f"{self.operation} {self.dtype} {self.tokens}x{self.k}x{self.n} {direction}"

    def operands(self, rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, w and dy of this rank."""
        w = world_size
        if self.operation == "all_gather_matmul":
            shapes = (self.tokens // w, self.k), (self.n // w, self.k), (self.tokens, self.n // w)
        else:
            shapes = (self.tokens, self.k // w), (self.n, self.k // w), (self.tokens // w, self.n)
        generator = torch.Generator().manual_seed(rank)
        draw = [torch.randn(shape, generator=generator).to(getattr(torch, self.dtype)) for shape in shapes]
        return draw[0], draw[1], draw[2]

    @property
    def matmul_flops(self) -> int:
        """Of one rank of two."""
        return self.tokens * self.k * self.n * (3 if self.backward else 1)

    @property
    def moved_bytes(self) -> int:
        """The largest tensor that one call gathers or scatters."""
        width = self.k if self.operation == "all_gather_matmul" else self.n
        if self.backward:
            width = max(self.k, width)
        return self.tokens * width * getattr(torch, self.dtype).itemsize


def ways(case: Case, engine: str) -> dict[str, Way]:
    """bare, gloo, ours -> what a sample runs."""
    group = dist.group.WORLD
    assert group is not None
    x, w, dy = case.operands(dist.get_rank(), dist.get_world_size())
    hand = Column if case.operation == "all_gather_matmul" else Row

    def by_hand(moves: Moves) -> Tensor:
        return hand.apply(moves, x, w)

    def ours() -> Tensor:
        if case.operation == "all_gather_matmul":
            return fusedtp.all_gather_matmul(x, [w], group, engine=engine)[0]
        return fusedtp.matmul_reduce_scatter(x, w, group, engine=engine)

    nothing, gloo = Nothing(), Gloo()
    forwards: dict[str, Callable[[], Tensor]] = {
        "bare": lambda: by_hand(nothing),
        "gloo": lambda: by_hand(gloo),
        "ours": ours,
    }
    if not case.backward:
        return {name: torch.no_grad()(forward) for name, forward in forwards.items()}
    x.requires_grad_(), w.requires_grad_()

    def both(forward: Callable[[], Tensor]) -> Way:
        return lambda: torch.autograd.grad(forward(), [x, w], dy)

    return {name: both(forward) for name, forward in forwards.items()}
