"""A case: one operation on drawn sizes, dtype, engine and layouts, and the tensors that ranks build from it.

Note [Exact inputs] Entries are integers of at most `Case.most` in absolute value. The longest sum of products in
forward or backward has L terms (K or the sum of K over ranks, the sum of N over weights and ranks, or T), and a bias
adds one more, so every partial sum, in any order, stays within L * most**2 + most. `most` is the largest integer for
which (L + 1) * most**2 is at most 2**p, where p is the number of significand bits of the dtype. Up to there all
integers are exact: products, sums, partials rounded to the working dtype and results, so correct engines agree bit for
bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isqrt

import torch
from torch import Tensor

BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")


@dataclass(frozen=True)
class Case:
    """One call. `local[r]` are the widths of rank r: N of each weight of a gather, the one K of a reduction."""

    operation: str
    engine: str
    dtype: torch.dtype
    sizes: tuple[int, ...]  # rows of every rank; per batch entry if there is a batch
    features: int  # common to all ranks: K of a gather, N of a reduction
    local: tuple[tuple[int, ...], ...]
    batch: int | None = None  # if given, shards lie along dim 1 of [batch, S_r, K]
    tell_sizes: bool = True
    biased: tuple[bool, ...] = ()  # per weight
    unused: tuple[int, ...] = ()  # outputs that no loss reads
    needs: frozenset[str] = frozenset("xwb")  # which of x, weights, biases require gradients
    layouts: dict[str, str] = field(default_factory=dict)  # of x, w, g; default contiguous
    random: bool = False  # normal entries instead of exact integers
    seed: int = 0

    @property
    def world_size(self) -> int:
        return len(self.sizes)

    @property
    def gathers(self) -> bool:
        return self.operation.startswith("all_gather")

    @property
    def rows(self) -> int:
        """T: rows of all ranks."""
        return sum(self.sizes) * (1 if self.batch is None else self.batch)

    @property
    def terms(self) -> int:
        """L: the longest sum of products in forward or backward."""
        across = sum(sum(widths) for widths in self.local)
        return max(self.features, across, self.rows)

    @property
    def most(self) -> int:
        """The largest entry; see Note [Exact inputs]."""
        most = isqrt(2 ** BITS[self.dtype] // (self.terms + 1))
        assert most >= 1, f"{self.terms} terms are too many to sum exactly in {self.dtype}"
        return most

    def shape(self, rows: int, width: int) -> tuple[int, ...]:
        """The shape of a tensor with this many rows (per batch entry)."""
        return (rows, width) if self.batch is None else (self.batch, rows, width)


@dataclass
class Tensors:
    """The data of all ranks; lists over ranks, then over weights."""

    xs: list[Tensor]  # gather: [T_r, K]; reduction: [T, K_r]
    weights: list[list[Tensor]]  # gather: [N_i, K] each; reduction: one [N, K_r]
    biases: list[list[Tensor | None]]  # gather: [N_i] each; reduction: one [N], the same on all ranks
    gradients: list[list[Tensor]]  # of the outputs; all_reduce: the same on all ranks

    def map(self, function: Callable[[Tensor], Tensor]) -> "Tensors":
        """Apply the function to every tensor."""
        lists = (
            [[None if t is None else function(t) for t in ts] for ts in of_rank]
            for of_rank in (self.weights, self.biases, self.gradients)
        )
        return Tensors([function(x) for x in self.xs], *lists)

    def only(self, case: Case, rank: int) -> "Tensors":
        """Inputs for the partial of one rank: zeros replace the other ranks' parts, and the bias of a reduction."""
        kept = self.map(lambda t: t)
        if case.gathers:
            kept.gradients = [gs if r == rank else [g * 0 for g in gs] for r, gs in enumerate(self.gradients)]
            return kept
        kept.xs = [x if r == rank else x * 0 for r, x in enumerate(self.xs)]
        kept.biases = [[None if b is None else b * 0 for b in bs] for bs in self.biases]
        return kept


class _Draw:
    def __init__(self, case: Case, device: str) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(case.seed)

    def __call__(self, shape: Sequence[int], layout: str = "contiguous") -> Tensor:
        case = self.case
        drawn = (*[min(n, 1) for n in shape[:-1]], shape[-1]) if layout == "expanded" else tuple(shape)
        if case.random:
            t = torch.randn(drawn, generator=self.generator, dtype=torch.float64)
        else:
            t = torch.randint(-case.most, case.most + 1, drawn, generator=self.generator)
        return arrange(t.to(case.dtype).to(self.device), shape, layout)


def arrange(t: Tensor, shape: Sequence[int], layout: str) -> Tensor:
    """`t` expanded to `shape`, with strides of the given layout; gaps and surroundings are NaN."""
    if layout == "transposed":
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "sliced":
        around = t.new_full((*t.shape[:-2], t.shape[-2] + 2, t.shape[-1] + 3), float("nan"))
        inner = around[..., 1:-1, 1:-2]
        return inner.copy_(t)
    return t.expand(*shape)


def build(case: Case, device: str = "cpu") -> Tensors:
    """The tensors of all ranks, the same on every rank."""
    draw = _Draw(case, device)
    x, w, g = (case.layouts.get(name, "contiguous") for name in "xwg")
    total = sum(case.sizes)
    if case.gathers:
        xs = [draw(case.shape(n, case.features), x) for n in case.sizes]
        weights = [[draw((n, case.features), w) for n in widths] for widths in case.local]
        biases = [[draw((n,)) if case.biased[i : i + 1] == (True,) else None for i, n in enumerate(widths)]
                  for widths in case.local]  # fmt: skip
        gradients = [[draw(case.shape(total, n), g) for n in widths] for widths in case.local]
        return Tensors(xs, weights, biases, gradients)
    xs = [draw(case.shape(total, k), x) for (k,) in case.local]
    weights = [[draw((case.features, k), w)] for (k,) in case.local]
    bias = draw((case.features,)) if any(case.biased) else None
    if case.operation == "matmul_all_reduce":
        gradients = [[draw(case.shape(total, case.features), g)]] * case.world_size
    else:
        gradients = [[draw(case.shape(n, case.features), g)] for n in case.sizes]
    return Tensors(xs, weights, [[bias]] * case.world_size, gradients)
