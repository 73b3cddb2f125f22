"""One case of a benchmark: an operation with its shape, dtype and number of ranks. The linear layers of a fused
operation come from its declaration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fusedtp.ops.operation import OPERATIONS as DECLARED
from fusedtp.ops.operation import Example
from fusedtp.ops.rows import split

from .options import Plan
from .rank import Rank
from .rivals import ByHand, Column, Nothing, Row
from .sample import Way
from .shapes import MODELS, Layer, Model, layers

OPERATIONS = ("all_gather_matmul", "matmul_reduce_scatter")  # those with a hand-written backward to compare with


Names = tuple[tuple[str, int | str], ...]


def named(**shape: int | str) -> Names:
    """A shape in the form shown in rows."""
    return tuple(shape.items())


@dataclass(frozen=True)
class Case:
    """T tokens of all ranks through an operation or a part of a model.

    operation   name of a declaration (fusedtp/ops/operation.py), or a suite's own name
    k, n        for a linear layer: its inputs and outputs, of all ranks together
    names       the shape as shown in rows, in this order
    model       other data of a suite, such as sizes of a model
    """

    operation: str
    dtype: str
    tokens: int
    k: int = 0
    n: int = 0
    backward: bool = False
    tp: int = 1
    names: Names = ()
    model: Any = None

    @property
    def shape(self) -> dict[str, int | str]:
        return dict(self.names)

    @property
    def label(self) -> str:
        """One line that names this case."""
        if self.names:
            return " ".join(f"{name}={value}" for name, value in self.names) + f" {self.dtype}"
        direction = "fwd+bwd" if self.backward else "fwd"
        return f"{self.operation} {self.dtype} {self.tokens}x{self.k}x{self.n} {direction}"

    @property
    def itemsize(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        return size

    # -- a linear layer, from its operation's declaration --

    @property
    def example(self) -> Example:
        """The example in its operation's declaration."""
        found = DECLARED[self.operation].example
        assert found is not None
        return found

    @property
    def of_rank(self) -> tuple[int, int]:
        """(K, N) of a rank."""
        column = self.example.layer == "column"
        return (self.k, self.n // self.tp) if column else (self.k // self.tp, self.n)

    @property
    def width(self) -> int:
        """Width of the tensor that is sent."""
        return self.k if self.example.moves == "gather" else self.n

    @property
    def flops(self) -> float:
        """FLOPs of all ranks, forward."""
        declared = DECLARED.get(self.operation)
        gated = declared is not None and declared.example is not None and declared.example.gated
        return 2.0 * self.tokens * self.k * self.n * (2 if gated else 1)

    @property
    def moved(self) -> int:
        """Bytes that all ranks together receive; for an all-reduce, the minimum without a switch."""
        once = (self.tp - 1) * self.tokens * self.width * self.itemsize
        return 2 * once if self.example.moves == "all_reduce" else once

    def operands(self, rank: int, world_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, w and dy of this rank on a CPU."""
        own, w = self.tokens // world_size, world_size
        gathers = self.example.moves == "gather"
        k, n = (self.k, self.n // w) if gathers else (self.k // w, self.n)
        of_y = (self.tokens, n) if gathers else (own, n)
        generator = torch.Generator().manual_seed(rank)
        shapes = *self.example.shapes(own, self.tokens, k, n), of_y
        x, w_, dy = (torch.randn(s, generator=generator).to(getattr(torch, self.dtype)) for s in shapes)
        return x, w_, dy

    def draw(self, rank: Rank) -> Callable[[int], tuple[Tensor, ...]]:
        """A function seed -> both operands of this rank, scaled so that results have magnitude about one."""
        x, w = self.example.shapes(split(self.tokens, self.tp)[rank.rank], self.tokens, *self.of_rank)
        scale = (self.k if self.example.layer == "row" else x[1]) ** -0.5

        def operands(seed: int) -> tuple[Tensor, ...]:
            first = rank.randn(*x, dtype=self.dtype, seed=2 * seed)
            return first, rank.randn(*w, dtype=self.dtype, seed=2 * seed + 1, scale=scale)

        return operands

    def call(self, rank: Rank, engine: str) -> Callable[..., Tensor]:
        """The public function, as a function of both operands."""
        run, group, sizes = self.example.call, rank.group, split(self.tokens, self.tp)
        return lambda x, w: run(x, w, group, sizes, engine)


def ways(case: Case, engine: str) -> dict[str, Way]:
    """The ways to run a case on CPU ranks, on the same operands.

    bare   the local matmuls on all ranks at once, no communication
    gloo   the process group's collectives and the same matmuls
    ours   fusedtp's operation
    """
    group = dist.group.WORLD
    assert group is not None
    world_size = dist.get_world_size()
    x, w, dy = case.operands(dist.get_rank(), world_size)
    hand = Column if case.example.moves == "gather" else Row
    nothing, gloo = Nothing(group), ByHand(group)
    run, sizes = case.example.call, split(case.tokens, world_size)
    forwards: dict[str, Callable[[], Tensor]] = {
        "bare": lambda: hand.apply(nothing, x, w),
        "gloo": lambda: hand.apply(gloo, x, w),
        "ours": lambda: run(x, w, group, sizes, engine),
    }
    if not case.backward:
        return {name: torch.no_grad()(forward) for name, forward in forwards.items()}
    x.requires_grad_(), w.requires_grad_()

    def both(forward: Callable[[], Tensor]) -> Way:
        return lambda: torch.autograd.grad(forward(), [x, w], dy)

    return {name: both(forward) for name, forward in forwards.items()}


# -- tables of cases -------------------------------------------------------------------------------------------------


def layer_cases(plan: Plan, tp: int, operation: str) -> list[Case]:
    """A declared operation for all tokens, matching layers of each model, and dtypes; small sizes first."""
    example = DECLARED[operation].example
    assert example is not None
    of = [layer for model in plan.shapes for layer in layers(model, tp) if layer.kind == example.layer]
    return [
        linear(operation, dtype, tokens, layer, tp)
        for tokens in sorted(plan.tokens)
        for layer in of
        for dtype in plan.dtypes
    ]


def linear(operation: str, dtype: str, tokens: int, layer: Layer, tp: int) -> Case:
    """An operation on a layer of a model; the layer's K and N are those of a rank."""
    k = layer.k * tp if layer.kind == "row" else layer.k
    n = layer.n * tp if layer.kind == "column" else layer.n
    names = named(model=layer.model, layer=layer.name, T=tokens, K=layer.k, N=layer.n, tp=tp)
    return Case(operation, dtype, tokens, k, n, False, tp, names)


def model_cases(suite: str, plan: Plan, tp: int, **more: Callable[[Model], int]) -> list[Case]:
    """A case for each model, number of tokens and dtype; small sizes first. `more` follows T in the names."""
    found = []
    for tokens in sorted(plan.tokens):
        for model in (MODELS[name] for name in plan.shapes if name in MODELS):
            extra = {name: of(model) for name, of in more.items()}
            names = named(model=model.name, T=tokens, **extra, tp=tp)
            found += [Case(suite, dtype, tokens, tp=tp, names=names, model=model) for dtype in plan.dtypes]
    return found


def even(cases: list[Case], suite: str) -> list[Case]:
    """Returns the cases if all ranks have the same number of rows, which the hand-written collectives require."""
    for case in cases:
        if case.tokens % case.tp:
            raise ValueError(f"{suite} needs equal rows: {case.tokens} tokens do not divide among {case.tp} ranks")
    return cases
